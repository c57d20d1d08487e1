"""The lines at the bottom that show the app's latest message."""

from __future__ import annotations

import textwrap

from rich.text import Text
from textual.notifications import Notification
from textual.widget import Widget
from textual.widgets import Static

_MARKS = {"warning": "⚠ ", "error": "⚠ "}
_MORE = "… (M: all)"
_LEAST_LINES, _MOST_LINES = 2, 8


class MessageLine(Static):
    """Shows the app's latest message, and is hidden if there is none.

    In a window, the widget takes lines of its own at the bottom. On the main screen, it covers the end of the panes, but neither
    the line with the keys nor the tree.

    in_place: whether the widget is on the main screen. It then takes its place in the layout even while it is hidden, so that other
    widgets move only if a message has more or fewer lines than the last one.
    """

    DEFAULT_CSS = """
    MessageLine { split: bottom; height: auto; max-height: 3; padding: 0 1; background: $panel; }
    """

    def __init__(self, in_place: bool = False) -> None:
        super().__init__(markup=False)
        self._in_place = in_place
        self._lines = _LEAST_LINES
        if in_place:
            self.visible = False
        else:
            self.display = False

    def show(self, said: Notification | None) -> None:
        """Show a message, truncated if it is too long. None hides the widget."""
        if said is not None:
            words = _MARKS.get(said.severity, "") + said.message
            if self._in_place and isinstance(self.parent, Widget):
                words = self._fitted(
                    words, max(20, self.parent.size.width - 2)
                )  # the widget itself has no size while it is hidden
            self.update(Text(words, style="bold"))
        if self._in_place:
            self.visible = said is not None
        else:
            self.display = said is not None

    def _fitted(self, words: str, width: int) -> str:
        """Set the widget's height so that the message `words` fits into it if wrapped to `width` cells. Returns the
        message, wrapped, and truncated if it needs more than _MOST_LINES lines.
        """
        lines = textwrap.wrap(words, width, break_on_hyphens=False)
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES - 1] = lines[_MOST_LINES - 1][: width - len(_MORE)] + _MORE
        needed = min(_MOST_LINES, max(_LEAST_LINES, len(lines)))
        if needed != self._lines:
            self._lines = self.styles.height = needed
        return "\n".join(lines[:_MOST_LINES])  # Textual breaks lines at other places
