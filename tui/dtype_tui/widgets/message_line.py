"""The lines at the bottom that show the app's latest message."""

from __future__ import annotations

import textwrap

from rich.text import Text
from textual.notifications import Notification
from textual.widget import Widget
from textual.widgets import Static

_MORE = "… (M: all)"
_LEAST_LINES, _MOST_LINES = 2, 8


class MessageLine(Static):
    """Shows the app's latest message, and is hidden if there is none. In a window, it takes lines of its own at the bottom.

    in_place: whether the widget is on the main screen. It then covers the end of the panes, and keeps its place in the layout while
    it is hidden, so that other widgets move only if a message has more or fewer lines than the last one.
    """

    DEFAULT_CSS = """
    MessageLine { split: bottom; height: auto; max-height: 3; padding: 0 1; background: $panel; }
    """

    def __init__(self, in_place: bool = False) -> None:
        super().__init__(markup=False)
        self._in_place = in_place
        self._lines = _LEAST_LINES
        self._set_shown(False)

    def _set_shown(self, shown: bool) -> None:
        if self._in_place:
            self.visible = shown
        else:
            self.display = shown

    def show(self, said: Notification | None) -> None:
        """Show a message, truncated if it is too long. None hides the widget."""
        if said is not None:
            words = ("" if said.severity == "information" else "⚠ ") + said.message
            if self._in_place and isinstance(self.parent, Widget):
                width = self.parent.size.width  # the widget itself has no size while it is hidden
                words = self._fitted(words, max(20, width - 2))
            self.update(Text(words, style="bold"))
        self._set_shown(said is not None)

    def _fitted(self, words: str, width: int) -> str:
        """Return the message in at most `_MOST_LINES` lines of `width` cells, and set the widget's height to fit."""
        lines = textwrap.wrap(words, width, break_on_hyphens=False)
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES - 1] = lines[_MOST_LINES - 1][: width - len(_MORE)] + _MORE
        needed = min(_MOST_LINES, max(_LEAST_LINES, len(lines)))
        if needed != self._lines:
            self._lines = self.styles.height = needed
        return "\n".join(lines[:_MOST_LINES])  # Textual breaks lines at other places
