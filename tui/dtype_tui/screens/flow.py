"""The window with the implicit casts of one forward pass."""

from __future__ import annotations

from rich.text import Text

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_count
from dtype_engine.results.drift import ImplicitCastStats
from dtype_tui.rendering.cells import truncate, wrap_dotted
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.overlay import Answer, Overlay

MOST_ROWS = 200
"""Maximum number of casts that are shown. Drawing a thousand takes two seconds, in which no key is handled."""
_NAME_WIDTH = 26
"""Minimum width in cells of the column of module names. If less is left, names of operations are truncated."""


def flow_screen(answer: Answer[None, tuple[ImplicitCastStats, ...]]) -> Overlay:
    """Return a window that lists the implicit casts of a forward pass, in the order of `answer`."""
    casts = answer.result
    if not casts:
        return Overlay("Dtype flow", Text("No implicit casts: the inputs of every operation had the same dtype."))
    repeated = any(cast.count > 1 for cast in casts)
    words = ("operation", "from → to", "elements", *(["times"] if repeated else []), "in torch")
    rows: list[list[Text]] = []
    for cast in casts[:MOST_ROWS]:
        change = Text(f"{_short(cast.source)} → ")
        change.append(_short(cast.target), style="bold" if cast.target == "float64" else "")
        raises = Text(cast.in_torch, style="bold" if cast.in_torch == "raises" else "dim")
        times = [Text(str(cast.count))] if repeated else []
        rows.append([Text(printable(cast.operation, 200)), change, Text(human_count(cast.elements)), *times, raises])
    widths = [
        max(len(word), *(cell.cell_len for cell in column))
        for word, column in zip(words, zip(*rows, strict=True), strict=True)
    ]
    name_width = Overlay.content_width(answer.width) - sum(widths) - 2 * len(widths)
    # A single long operation must not leave too little room for all the names.
    longest = max(len(words[0]), widths[0] - max(0, _NAME_WIDTH - name_width))
    name_width += widths[0] - min(widths[0], longest)
    for row in rows:
        row[0] = Text(truncate(row[0].plain, longest))
    grid = PlainTable.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    for word in words:
        grid.add_column(no_wrap=True, justify="right" if word in ("elements", "times") else "left")
    grid.add_row("module", *words, style="dim")
    for cast, row in zip(casts, rows, strict=False):
        grid.add_row(wrap_dotted(printable(cast.module, 500) or "the model", name_width), *row)
    if len(casts) > MOST_ROWS:
        grid.add_row(f"and {len(casts) - MOST_ROWS:,} more", style="dim")
    return Overlay("Dtype flow of one forward pass", grid)


def _short(dtype: str) -> str:
    return printable(dtypes.short_name(dtype), 40)
