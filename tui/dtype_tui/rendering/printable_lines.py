"""Checks every drawn line last, so that only printable text reaches the terminal even if other code forgot to escape a text."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from dtype_engine.core.text import is_printable


class PrintableLines(LineFilter):
    """Replaces unprintable characters by question marks, one for each cell. Most of them take no cell, so they are just removed."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(is_printable(segment.text) for segment in segments):
            return segments
        return [Segment(_printable(segment.text), segment.style) for segment in segments]


def _printable(text: str) -> str:
    drawn = "".join(each if is_printable(each) else "?" * cell_len(each) for each in text)
    return drawn + " " * (cell_len(text) - cell_len(drawn))
