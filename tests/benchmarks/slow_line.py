"""A session over a line of 50 kB/s with 200 ms there and back: how long a key's answer takes to stand on the screen."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .rows import Row

if TYPE_CHECKING:
    from tests.helpers.throttled_terminal import ThrottledTerminal

_KEYS = 60


def slow_line(folder: Path) -> list[Row]:
    """The demo at 120 x 36, which is measured on a long text; then it is told to stop."""
    from tests.helpers.throttled_terminal import ThrottledTerminal

    text = folder.parent / "long.txt"
    text.write_text(40 * Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    opened = ThrottledTerminal("demo", "--cast", "*.mlp=bf16", "--text", str(text))
    try:
        opened.wait_for("measuring", 240)
        opened.longest_queue_s, before, begun = 0.0, len(opened.raw), time.perf_counter()
        busy = moves(opened, _KEYS)
        rate, queue = (len(opened.raw) - before) / (time.perf_counter() - begun), opened.longest_queue_s
        assert "measuring" in opened.text, opened.text
        opened.press("\x1b")
        opened.wait_for(" ready ", 240)
        idle = moves(opened, _KEYS)
    finally:
        opened.close()
    where = "50 kB/s, 200 ms"
    return [
        Row(f"{where}: until a key's answer stands, idle, p50", 1000 * statistics.median(idle), "ms", 300),
        Row(f"{where}: the same while measuring, p50", 1000 * statistics.median(busy), "ms", 300),
        Row(f"{where}: the longest of {_KEYS} while measuring", 1000 * max(busy), "ms", 500),
        Row(f"{where}: the longest that anything waited for the line then", 1000 * queue, "ms", 300),
        Row(f"{where}: bytes a second while measuring, keys and all", rate / 1000, "kB", 25),
    ]


def moves(opened: ThrottledTerminal, count: int) -> list[float]:
    """Seconds until the tree's cursor stands, for so many moves: two down, two up, and so on, 0.3 s after one another."""
    taken = []
    for number in range(count):
        place = number % 4
        taken.append(opened.seconds_until_it_stands("j" if place < 2 else "k", (3, 4, 3, 2)[place]))
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            opened.read(0.02)
    return taken
