"""The columns of the module tree: which of them fit, and how wide they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from dtype_tui.widgets.tree_rows import Row

COLUMNS = ("params", "bytes", "drift")
"""Columns that the user can hide. The name and the dtype are always shown."""
EDGE = 2
"""Number of cells at the left of every row, for the edge of the cursor and the mark of a row that a typed rule would match."""
_WIDE = 92
"""Minimum width in cells of the tree for a column of parameter counts and a wide dtype column."""
_STEP = 6
"""The width for names is rounded up to a multiple of this number of cells, so that columns rarely move."""
_LEAST_NAME = 24
_LEAST_ABOUT = len("failed here")
_MOST_TRACK, _MOST_SHARE = 14, 8


class Columns(msgspec.Struct, frozen=True):
    """Widths of the columns in cells, each with the blanks before it. A column of width 0 is not shown."""

    name: int
    dtype: int
    parameters: int = 0
    size: int = 0
    share: int = 0
    """Width of the bar that shows a node's share of its parent's bytes."""
    drift: int = 0
    track: int = 0
    """Width of the bar that shows a module's SQNR."""
    other: int = 0
    """Width of the SQNR under the baseline recipe."""
    change: int = 0
    scan: int = 0
    heat: int = 0

    @property
    def numbers(self) -> int:
        """The total width of all columns but the name."""
        figures = self.drift + self.track + self.other + self.change + self.scan + self.heat
        return self.dtype + self.parameters + self.size + self.share + figures


_LESS: tuple[Callable[[Columns], Columns], ...] = (
    lambda columns: replace(columns, parameters=0),
    lambda columns: replace(columns, share=0),
    lambda columns: replace(columns, other=0),
    lambda columns: replace(columns, dtype=min(columns.dtype, 13)),
    lambda columns: replace(columns, track=0),
    lambda columns: replace(columns, heat=0),
)
"""Functions that leave out or narrow one more column each, applied in this order until the names have enough room."""
_STILL_LESS: tuple[Callable[[Columns], Columns], ...] = (
    lambda columns: replace(columns, dtype=min(columns.dtype, 11)),
    lambda columns: replace(columns, drift=0) if columns.scan or columns.change else columns,
    lambda columns: replace(columns, scan=0),
    lambda columns: replace(columns, drift=0, change=0),
)
"""Further such functions, applied after `_LESS` until all names fit or the column of names has two fifths of the line."""


def needed_width(rows: Iterable[Row], title: str) -> tuple[int, int]:
    """Return two widths in cells: of the widest name with its indent, and of the widest name with its indent and the text after
    it. The second is rounded up to a multiple of `_STEP`. title: the root's name.
    """
    label, whole = _LEAST_NAME, 0
    for row in rows:
        name = EDGE + 2 * row.depth + 2 + len(row.label or title) + 1
        label, whole = (
            max(label, name),
            max(whole, name + 2 + max(len(f"{row.about} {row.sizes}".rstrip()), _LEAST_ABOUT)),
        )
    return label, -(-whole // _STEP) * _STEP


@lru_cache(16)
def columns_for(
    width: int,
    needed: tuple[int, int] = (0, 0),
    hidden: frozenset[str] = frozenset(),
    scanned: bool = False,
    compares: bool = False,
) -> Columns:
    """Return column widths for a line of `width` cells.

    The names get the width that they need, up to half of the line. To make room for them, `_LESS` narrows or leaves out other
    columns. `_STILL_LESS` does so, too, but only while the names have less than two fifths of the line.

    needed: what `needed_width` returns for the rows. scanned: whether there are scores. compares: whether there is a baseline.
    """
    wide = width >= _WIDE
    columns = Columns(0, 25 if wide else 13)
    if wide and "params" not in hidden:
        columns = replace(columns, parameters=10)
    if "bytes" not in hidden:
        columns = replace(columns, size=10, share=5)
    if "drift" not in hidden:
        columns = replace(columns, drift=8, track=6)
        if compares:
            columns = replace(columns, other=8, change=7)
    if scanned:
        columns = replace(columns, scan=10, heat=4)
    for most, steps in ((width // 2, _LESS), (2 * width // 5, _STILL_LESS)):
        for step in steps:
            if width - columns.numbers >= min(needed[0], most):
                break
            columns = step(columns)
    room = max(10, width - columns.numbers - 1)
    name = min(room, max(needed[1], _LEAST_NAME))
    spare = room - name
    track = min(spare, _MOST_TRACK - columns.track) if columns.track else 0
    share = min(spare - track, _MOST_SHARE - columns.share) if columns.share else 0
    return replace(columns, name=name, track=columns.track + track, share=columns.share + share)
