"""One table: what a person meets, for models of three sizes in terminals of three sizes, beside an empty Textual app."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .rows import Row
from .watched import EMPTY_APP, keys, p99

SIZES = ((80, 24), (120, 36), (200, 50))
_COLUMNS = (
    ("program", 16), ("size", 8), ("paint ms", 9), ("ready s", 8), ("p50 ms", 7), ("p99 ms", 7), ("busy p50", 9),
    ("busy p99", 9), ("move B", 7), ("page B", 7), ("RSS MiB", 8),
)  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """A program and how it shows that it is ready, the key `first` that brings it to a long list, and the keys `page` and
    `busy`, None where it has none.
    """

    name: str
    program: str
    arguments: tuple[str, ...]
    painted: str
    ready: str | None
    page: str | None = "\x1b[6~"
    busy: str | None = None
    first: str = "E"


def table(folder: Path) -> list[Row]:
    """Prints the table; the rows are the budgets in it, at 120 x 36."""
    import psutil
    from tests.helpers import large_checkpoints, terminal

    giant = large_checkpoints.write(folder.parent / "giant")
    ours = terminal.PROGRAM
    shown = [
        Shown("empty Textual", sys.executable, ("-c", EMPTY_APP), "embed_tokens", None, None),
        Shown("demo", ours, ("demo",), "embed_tokens", "ready", busy="t"),
        Shown("24 layers", ours, (str(folder),), "embed_tokens", "ready", busy="t"),
        Shown("671 B", ours, (str(giant),), "embed_tokens", "671.1 B"),
    ]
    if (other := shutil.which("sft")) is not None:
        shown.append(
            Shown("sft-cli", other, (str(folder / "model.safetensors"),), "embed_tokens", "embed_tokens", first="\t")
        )
    print(_line([name for name, _ in _COLUMNS]), flush=True)
    rows: list[Row] = []
    for one in shown:
        for size in SIZES:
            terminal.PROGRAM = one.program
            opened = terminal.Terminal(*one.arguments, size=size)
            terminal.PROGRAM = ours
            opened.wait_for(one.painted)
            paint = 1000 * (time.perf_counter() - opened.started)
            cells: list[str] = [one.name, f"{size[0]}x{size[1]}", f"{paint:.0f}"]
            measured: dict[str, float] = {}
            if one.ready is not None:
                opened.wait_for(one.ready, 120)
                cells.append(f"{time.perf_counter() - opened.started:.1f}")
                opened.press(one.first)
                time.sleep(1)
                idle, moves = keys(opened, 100 if one.program == ours else 20)  # others may take a second for each
                measured |= {"p99": 1000 * p99(idle), "move": max(moves)}
                silent = statistics.median(moves) == 0  # after two seconds
                cells += (
                    ["none", "none"] if silent else [f"{1000 * statistics.median(idle):.1f}", f"{measured['p99']:.1f}"]
                )
                busy = _busy(opened, one.busy) if one.busy is not None else []
                if busy:
                    measured["busy"] = 1000 * p99(busy)
                    cells += [f"{1000 * statistics.median(busy):.1f}", f"{measured['busy']:.1f}"]
                else:
                    cells += ["", ""]
                while opened.read(0.3):
                    pass
                pages = []
                for key in (one.page, "\x1b[5~") * 2 if one.page else ():
                    opened.press(key or "")
                    wrote = opened.read(2.0)
                    while more := opened.read(0.1):
                        wrote += more
                    pages.append(wrote)
                measured["page"] = max(pages, default=0)
                cells += [f"{statistics.median(moves):.0f}", f"{measured['page']:.0f}"]
            else:
                time.sleep(0.5)
                cells += [""] * 7
            cells.append(f"{psutil.Process(opened.pid).memory_info().rss / 2**20:.0f}")
            opened.close()
            print(_line(cells), flush=True)
            if size == (120, 36) and measured and one.program == ours:
                rows += [
                    Row(f"{one.name}: key to first byte, p99", measured["p99"], "ms", 30),
                    Row(f"{one.name}: bytes of a cursor move, most", measured["move"], "B", 1024),
                    Row(f"{one.name}: bytes of a page, most", measured["page"], "B", 12 << 10),
                ]
                if "busy" in measured:
                    what = f"{one.name}: key to first byte while the engine runs the model, p99"
                    rows.append(Row(what, measured["busy"], "ms", 50))
    return rows


def _busy(opened: object, key: str) -> list[float]:
    """Return the times of keys while the engine runs the model, as it does to measure speed, until there are a hundred."""
    from tests.helpers.terminal import Terminal

    assert isinstance(opened, Terminal)
    times: list[float] = []
    until = time.perf_counter() + 60
    while len(times) < 100 and time.perf_counter() < until:
        opened.press(key)
        opened.wait_for("timing", 20)
        times += keys(opened, 50, until="timing")[0]
        until = max(until, time.perf_counter() + 20)
        while "timing" in opened.text or "Esc closes" in opened.text:
            assert time.perf_counter() < until, opened.text
            opened.press("\x1b")  # stops it, or closes the result
            while opened.read(0.5):
                pass
    return times


def _line(cells: Sequence[str]) -> str:
    return "".join(
        f"{cell:<{width}}" if place < 2 else f"{cell:>{width}}"
        for place, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
    )
