"""The way from the start until all is there, with the engine in a process of its own and in a thread: keys, seconds, memory."""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .rows import Row
from .watched import p99

if TYPE_CHECKING:
    from tests.helpers.terminal import Terminal

_DOWN, _UP = "\x1b[B", "\x1b[A"
_FIRST_ROW = 2
"""The screen's row of the model in the tree; the first is 0."""
_LOST_S = 10.0
_WAITS_S = (0.0, 0.015, 0.03, 0.045, 0.06, 0.08, 0.1)
"""Seconds from the first paint to the first key, one start for each. Mounting the panes in this time delays a key the most."""
_PAINTED = r"embed|planning only"
_FIGURE = r"exact|KL mean|SQNR +\d|planning only"
_READY = r"\bready\b|planning only"


@dataclass(frozen=True)
class Start:
    """One start. figure: seconds from it to the first figure of the output. keys: seconds from a key to the bytes that move the
    cursor, of all that were pressed until the engine was ready. memory: MiB of all its processes then, shared pages divided by
    those who share them.
    """

    figure: float
    keys: tuple[float, ...]
    memory: float


def starting(folder: Path) -> list[Row]:
    """The demo, an encoder of the size of MiniLM, and headers of 671 B parameters; the two ways take turns."""
    from tests.helpers import large_checkpoints

    rows: list[Row] = []
    for answers in (True, False):
        pressed: list[float] = []
        for wait in _WAITS_S:
            pressed += start(("demo",), answers, wait).keys
        terminal = "a terminal that answers questions" if answers else "one that answers none"
        what = f"demo, {terminal}: slowest of {len(pressed)} keys from first paint to ready"
        rows.append(Row(what, 1000 * max(pressed), "ms", 100))
    giant = large_checkpoints.write(folder.parent / "giant-start")
    models = (("demo", "demo"), ("22 M encoder", str(encoder(folder.parent / "encoder"))), ("671 B", str(giant)))
    for name, model in models:
        ours, threads = [], []
        for wait in _WAITS_S[::2]:
            ours.append(start((model,), wait=wait))
            threads.append(start((model, "--in-process"), wait=wait))
        keys = [seconds for one in ours for seconds in one.keys]
        figures = [statistics.median(one.figure for one in way) for way in (ours, threads)]
        memory = [statistics.median(one.memory for one in way) for way in (ours, threads)]
        what = f"{name}: keys from first paint to ready, p99 of {len(keys)} in {len(ours)} starts"
        rows += [
            Row(what, 1000 * p99(keys), "ms", 30),
            Row(f"{name}: the slowest of them", 1000 * max(keys), "ms", 100),
            Row(f"{name}: the slowest with the engine in a thread", 1000 * max(max(one.keys) for one in threads), "ms"),
            Row(f"{name}: first figure / with the engine in a thread", figures[0] / figures[1], "x"),
            Row(f"{name}: memory of both processes less that of one", memory[0] - memory[1], "MiB"),
        ]
    return rows


def encoder(folder: Path) -> Path:
    """A checkpoint of the shape of all-MiniLM-L6-v2, with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def start(arguments: Sequence[str], answers: bool = True, wait: float = 0.0) -> Start:
    """Start the app, and press keys from `wait` seconds after its first paint until the engine is ready."""
    from tests.helpers.terminal import Terminal

    opened = Terminal(*arguments, answers=answers)
    opened.wait_for(_PAINTED)
    time.sleep(wait)
    keys: list[float] = []
    figure: float | None = None
    key = _DOWN
    while not re.search(_READY, opened.text):
        row = _cursor_row(opened)
        if row is None or row <= _FIRST_ROW:  # at either end of the tree a key would move nothing
            key = _DOWN
        elif row >= _FIRST_ROW + 4:
            key = _UP
        keys.append(_until_moved(opened, key))
        quiet = time.perf_counter()
        while time.perf_counter() - quiet < 0.04:
            if opened.read(0.01):
                quiet = time.perf_counter()
        if figure is None and re.search(_FIGURE, opened.text):
            figure = time.perf_counter() - opened.started
    time.sleep(0.5)
    memory = _pss(opened.pid)
    opened.close()
    return Start(figure or time.perf_counter() - opened.started, tuple(keys), memory)


def _cursor_row(opened: Terminal) -> int | None:
    """Return the row of the cursor in the module tree, or None while the cursor is being drawn."""
    rows = [row for row, line in enumerate(opened.text.split("\n")) if line.startswith("▌")]
    return rows[0] if len(rows) == 1 else None


def _until_moved(opened: Terminal, key: str) -> float:
    """Seconds from a key to the arrival of the bytes that move the tree's cursor. What arrives is shown afterwards, because that
    takes time in which nothing is read.
    """
    row, pressed = _cursor_row(opened), time.perf_counter()
    opened.press(key)
    while time.perf_counter() - pressed < _LOST_S:
        arrived: list[tuple[float, bytes]] = []
        while data := opened.take(0.05):
            arrived.append((time.perf_counter(), data))
        taken = None
        for at, data in arrived:
            opened.show(data)
            if taken is None and _cursor_row(opened) not in (row, None):
                taken = at - pressed
        if taken is not None:
            return taken
    raise AssertionError(f"{key!r} moved nothing:\n{opened.text}")


def _pss(process: int) -> float:
    """MiB of a process and its children (Linux's proportional set size)."""
    listed = subprocess.run(("ps", "-o", "pid=", "--ppid", str(process)), capture_output=True, text=True, check=False)
    total = 0
    for number in (process, *map(int, listed.stdout.split())):
        try:
            text = Path(f"/proc/{number}/smaps_rollup").read_text()
        except OSError:  # it has just ended
            continue
        total += int(re.findall(r"^Pss:\s+(\d+)", text, re.MULTILINE)[0])
    return total / 1024
