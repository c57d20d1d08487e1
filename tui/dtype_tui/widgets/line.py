"""A line of text at the top or the bottom of the screen."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from textual import events
from textual.strip import Strip
from textual.widget import Widget

ACTION = "key_action"
"""The entry of a style's metadata that holds the action of a key. Textual would draw text with its own entry `@click` as a link."""


class Line(Widget):
    """A line of text. A click on a key, or on the words after it, runs the action of the key."""

    DEFAULT_CSS = "Line { height: 1; }"

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.text = Text()
        self._painted = Strip([])

    def show(self, text: Text) -> None:
        """Show another text, filled up with blanks or cut off to the widget's width."""
        if text == self.text:
            return
        self.text = text
        before, self._painted = self._painted, self._drawn()
        if before != self._painted:
            self.refresh()

    def _drawn(self) -> Strip:
        return Strip(self.text.render(self.app.console)).adjust_cell_length(self.size.width, Style()).simplify()

    def render_line(self, y: int) -> Strip:
        if self._painted.cell_length != self.size.width:
            self._painted = self._drawn()
        base = self.rich_style
        return self._painted.apply_style(Style(color=base.color, bgcolor=base.bgcolor))

    async def on_click(self, event: events.Click) -> None:
        if action := event.style.meta.get(ACTION):
            await self.app.run_action(action, self.screen)
