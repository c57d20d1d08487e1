"""A program watched from outside, in a pseudo-terminal: when it paints, how soon it answers a key, what it writes."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .training import copy_tokenizer

if TYPE_CHECKING:
    from tests.helpers.terminal import Terminal

EMPTY_APP = """
from textual.app import App
from textual.widgets import Static

class Empty(App):
    def compose(self):
        yield Static("embed_tokens")

Empty().run()
"""


def first_paints(*programs: tuple[str, ...]) -> list[float]:
    """Seconds from the start of each program to the first word of a tree on the screen: medians of seven turns, after one to
    warm up. They take turns, so that what else the machine does falls on all of them.
    """
    from tests.helpers import terminal

    times: list[list[float]] = [[] for _ in programs]
    own = terminal.PROGRAM
    for _ in range(8):
        for (program, *arguments), taken in zip(programs, times, strict=True):
            terminal.PROGRAM = program
            opened = terminal.Terminal(*arguments)
            opened.wait_for("embed_tok")
            taken.append(time.perf_counter() - opened.started)
            opened.close()
    terminal.PROGRAM = own
    return [statistics.median(taken[1:]) for taken in times]


def keys(opened: Terminal, pairs: int, until: str | None = None) -> tuple[list[float], list[int]]:
    """Press keys while the screen contains `until`. Returns the seconds from each key to its first byte, and the bytes written for
    it.
    """
    times: list[float] = []
    sizes: list[int] = []
    for press in range(2 * pairs):
        while opened.read(0.0):
            pass
        if until is not None and until not in opened.text:
            break
        pressed = time.perf_counter()
        # Four rows down and four up: a tree whose alike layers share a row is short, and a key at its end draws nothing.
        opened.press("\x1b[B" if (press // 4) % 2 == 0 else "\x1b[A")
        size = opened.read(2.0)
        times.append(time.perf_counter() - pressed)
        quiet = time.perf_counter()
        while time.perf_counter() - quiet < 0.03:
            if more := opened.read(0.01):
                size += more
                quiet = time.perf_counter()
        sizes.append(size)
    if times and until is not None and until not in opened.text:
        # The last key may have met what came afterwards, where it does nothing, and the next bytes are no answer to it.
        times.pop()
        sizes.pop()
    return times, sizes


def with_long_text(folder: Path) -> Path:
    """Give a checkpoint the demo's tokenizer, and return a text that it takes some seconds to measure."""
    copy_tokenizer(folder)
    text = folder / "text.txt"
    text.write_text(Path(argparse.__file__).read_text(encoding="utf-8")[:40_000], encoding="utf-8")
    return text


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
