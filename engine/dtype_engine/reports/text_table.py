"""Plain columns for a terminal or a pipe: no lines, no colours, no trailing spaces."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table_lines(rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: str = "") -> list[str]:
    """One line a row, two spaces between columns as wide as their widest cell; `right`: indices of those set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
