"""A Rich table that does not interpret markup."""

from __future__ import annotations

from rich.console import RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text


class PlainTable(Table):
    """A table that shows its strings literally, not as markup, since names of modules, classes and files may contain brackets."""

    @classmethod
    def labelled(cls, gap: int = 2, columns: int = 1) -> Table:
        """Return a grid with a column of dimmed labels and `columns` further columns, `gap` cells apart. Long text is wrapped."""
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
