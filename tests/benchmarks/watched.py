"""A program watched from outside, in a pseudo-terminal: when it paints, how soon it answers a key, what it writes."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent / "terminal"))

if TYPE_CHECKING:
    from terminal import Terminal

EMPTY_APP = """
from textual.app import App
from textual.widgets import Static

class Empty(App):
    def compose(self):
        yield Static("embed_tokens")

Empty().run()
"""


def first_paint(program: str, *arguments: str) -> float:
    """Seconds from the start of a program to the first word on the screen: the median of three, after a warm-up."""
    import terminal

    own, terminal.PROGRAM = terminal.PROGRAM, program
    times = []
    for _ in range(4):
        opened = terminal.Terminal(*arguments)
        opened.wait_for(r"\w{8}")
        times.append(time.perf_counter() - opened.started)
        opened.close()
    terminal.PROGRAM = own
    return statistics.median(times[1:])


def keys(opened: Terminal, pairs: int, until: str | None = None) -> tuple[list[float], list[int]]:
    """Seconds from key to first byte, and bytes written for each, while the screen matches `until`."""
    times: list[float] = []
    sizes: list[int] = []
    for press in range(2 * pairs):
        while opened.read(0.0):
            pass
        if until is not None and until not in opened.text:
            break
        pressed = time.perf_counter()
        opened.press("j" if (press // 8) % 2 == 0 else "k")
        size = opened.read(2.0)
        times.append(time.perf_counter() - pressed)
        quiet = time.perf_counter()
        while time.perf_counter() - quiet < 0.03:
            if more := opened.read(0.01):
                size += more
                quiet = time.perf_counter()
        sizes.append(size)
    return times, sizes


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
