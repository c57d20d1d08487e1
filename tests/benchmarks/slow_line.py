"""A session over 9,600 baud: how long a key's answer takes to stand, beside Textual's own frames on the same line."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .rows import Row

if TYPE_CHECKING:
    from tests.helpers.throttled_terminal import ThrottledTerminal

_TEXTUALS_OWN = {"TEXTUAL_DRIVER": "textual.drivers.linux_driver:LinuxDriver"}
_KEYS = 24


def slow_line(folder: Path) -> list[Row]:
    """The demo at 80 x 24, which is measured on a long text; then it is told to stop."""
    text = folder.parent / "long.txt"
    text.write_text(40 * Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    tree, busy, idle = _session(text, {}, _KEYS)
    # One key: while the panes change it waits for a minute behind frames that were drawn before it.
    tree_before, (busy_before,), (idle_before,) = _session(text, _TEXTUALS_OWN, 1)
    rows = [Row("9,600 baud: bytes until the tree stands / with Textual's own frames", tree / tree_before, "x", 1.2)]
    for name, now, before in (("idle", idle, idle_before), ("while measuring", busy, busy_before)):
        rows += [
            Row(f"9,600 baud: until a key's answer stands, {name}, p50", statistics.median(now), "s", 0.5),
            Row(f"9,600 baud: the longest of {_KEYS}", max(now), "s", 1.5),
            Row("9,600 baud: one key with Textual's own frames", before, "s"),
        ]
    return rows


def _session(text: Path, environment: dict[str, str], keys: int) -> tuple[int, list[float], list[float]]:
    """Bytes until the tree's last line in sight; seconds for each key while the engine measures; for each when it does not."""
    from tests.helpers.throttled_terminal import ThrottledTerminal

    opened = ThrottledTerminal("demo", "--text", str(text), environment=environment)
    try:
        opened.wait_for(r"▸ 5 ", 120)
        tree = len(opened.raw)
        opened.wait_for("measuring", 240)
        busy = _moves(opened, range(keys))
        assert "measuring" in opened.text, opened.text
        opened.press("\x1b")
        opened.wait_for(" ready ", 240)
        opened.settle()
        return tree, busy, _moves(opened, range(keys, 2 * keys))
    finally:
        opened.close()


def _moves(opened: ThrottledTerminal, places: range) -> list[float]:
    """Two down, two up, and so on, half a second after one another."""
    taken = []
    for number in places:
        place = number % 4
        taken.append(opened.seconds_until_it_stands("j" if place < 2 else "k", (2, 3, 2, 1)[place]))
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until:
            opened.read(0.02)
    return taken
