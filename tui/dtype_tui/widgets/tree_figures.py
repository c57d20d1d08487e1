"""The right part of the module tree: the columns of drift, which change with every measurement."""

from __future__ import annotations

from collections.abc import Callable

from textual import events
from textual.strip import Strip
from textual.widget import Widget

from dtype_tui.rendering.changed_cells import changed_cells


class TreeFigures(Widget):
    """Draws the columns of drift over the right end of the tree's lines.

    They are a separate widget because Textual writes a changed line from the left edge of its widget on. In the tree's own widget,
    a new measurement would write every name again.

    tree: the tree. line: a function that returns the whole line in a row of the tree, given the number of the row.
    """

    DEFAULT_CSS = "TreeFigures { dock: right; width: 0; height: 100%; margin-right: 1; }"

    def __init__(self, tree: Widget, line: Callable[[int], Strip]) -> None:
        super().__init__()
        self._tree = tree
        self._line = line
        self._painted: dict[int, Strip] = {}

    def show(self, y: int, line: Strip) -> None:
        """Redraw those cells of the row `y` that have changed. line: the whole line of the tree."""
        painted, new = self._painted.get(y), self._part(line)
        if painted is not None and (changed := changed_cells(painted, new, y)):
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        self._painted[y] = self._part(self._line(y))
        return self._painted[y]

    def _part(self, line: Strip) -> Strip:
        start = self.region.x - self._tree.region.x
        return line.crop(start, start + self.size.width)

    async def on_event(self, event: events.Event) -> None:
        """Pass clicks and turns of the mouse wheel to the tree, because its lines continue here."""
        if isinstance(event, events.Click | events.MouseScrollDown | events.MouseScrollUp):
            self._tree.post_message(event)
        elif isinstance(event, events.MouseDown):
            self._tree.focus()
        else:
            await super().on_event(event)
