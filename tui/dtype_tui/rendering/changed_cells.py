"""Finds the cells of a line that have changed, so that only those are written to the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip


def changed_cells(old: Strip, new: Strip, y: int = 0) -> Region:
    """Return the region from the first to the last cell that has changed. It is empty if no cell has. old, new: the line before and
    after the change, with the same width. y: the row of the line.
    """
    one, other = _cells(old), _cells(new)
    if len(one) != old.cell_length or len(other) != new.cell_length or len(one) != len(other):
        return Region(0, y, max(old.cell_length, new.cell_length), 1)  # it has wide characters: redraw all of it
    differing = [column for column, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return Region(differing[0], y, differing[-1] + 1 - differing[0], 1) if differing else Region()


def _cells(strip: Strip) -> Sequence[tuple[str, Style | None]]:
    return [(character, segment.style) for segment in strip for character in segment.text]
