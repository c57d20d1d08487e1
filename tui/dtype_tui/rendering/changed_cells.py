"""Finds the cells of a line that have changed, so that only those are written to the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip

_FEWEST_BETWEEN = 24
"""Minimum number of unchanged cells between two regions. Fewer cells cost less than the second region does."""


def changed_cells(old: Strip, new: Strip, y: int = 0) -> list[Region]:
    """Return the regions of the cells that have changed, with a few of the unchanged cells between them. Empty if no cell has
    changed.

    old, new: the line before and after the change, with the same width. y: the row of the line.
    """
    if old == new:
        return []
    one, other = _cells(old), _cells(new)
    if len(one) != old.cell_length or len(other) != new.cell_length or len(one) != len(other):
        return [Region(0, y, max(old.cell_length, new.cell_length), 1)]  # it has wide characters: redraw all of it
    regions: list[Region] = []
    for column, (a, b) in enumerate(zip(one, other, strict=True)):
        if a == b:
            continue
        start = regions.pop().x if regions and column - regions[-1].right < _FEWEST_BETWEEN else column
        regions.append(Region(start, y, column + 1 - start, 1))
    return regions


def _cells(strip: Strip) -> Sequence[tuple[str, Style | None]]:
    return [(character, segment.style) for segment in strip for character in segment.text]
