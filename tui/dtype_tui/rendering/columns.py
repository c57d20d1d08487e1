"""Arranges blocks of lines in columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from rich.text import Text

GAP = 2


def in_columns(blocks: Sequence[Sequence[Text]], width: int, narrowest: int) -> Text:
    """Return the blocks, in order, in as many columns of at least `narrowest` cells as fit into `width` cells. No block is split,
    the text has as few lines as possible, and lines that are too long for their column are truncated.
    """
    most = max(1, min(len(blocks), (width + GAP) // (narrowest + GAP)))
    columns = min(_partitions(blocks, most), key=lambda found: max(map(len, found)))
    cells = (width + GAP) // most - GAP
    page = Text()
    for row in range(max(map(len, columns))):
        for index, column in enumerate(columns):
            line = column[row].copy() if row < len(column) else Text()
            line.truncate(cells, overflow="ellipsis", pad=index + 1 < len(columns))
            page.append_text(line)
            page.append(" " * GAP if index + 1 < len(columns) else "\n")
    page.right_crop(1)
    return page


def _partitions(blocks: Sequence[Sequence[Text]], count: int) -> list[list[list[Text]]]:
    """Return every way to distribute the blocks, in order, over `count` columns. In a column, an empty line separates blocks."""
    found = []
    for cuts in combinations(range(1, len(blocks)), count - 1):
        bounds = [0, *cuts, len(blocks)]
        columns = []
        for first, end in pairwise(bounds):
            column: list[Text] = []
            for block in blocks[first:end]:
                column += [*([Text()] if column else []), *block]
            columns.append(column)
        found.append(columns)
    return found
