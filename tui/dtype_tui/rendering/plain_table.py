"""Rich's table, whose text is text."""

from __future__ import annotations

from rich.console import RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text


class PlainTable(Table):
    """A table that takes no string for markup: names of modules, classes and files may have brackets in them."""

    @classmethod
    def labelled(cls, gap: int = 2, columns: int = 1) -> Table:
        """A grid of dim labels, each before one cell or several, `gap` cells apart; long text is folded."""
        grid = cls.grid(padding=(0, gap))
        grid.add_column(style="dim", no_wrap=True)
        for _ in range(columns):
            grid.add_column(overflow="fold")
        return grid

    def add_row(
        self, *renderables: RenderableType | None, style: StyleType | None = None, end_section: bool = False
    ) -> None:
        cells = (Text(cell) if isinstance(cell, str) else cell for cell in renderables)
        super().add_row(*cells, style=style, end_section=end_section)
