"""The line with the last sentence that the app had to say."""

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
    """In a window it takes lines of its own; on the main screen it stands over the end of the panes. So it covers neither keys nor
    a window's words nor the cursor. With nothing to say it is not seen.

    in_place: its lines are there, unseen, all the time: to come and go changes no layout, so nothing else is drawn again, unless a
    sentence takes more lines or fewer than the one before.
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
        """Show what was said, as far as there is room for it, or nothing."""
        if said is not None:
            words = _MARKS.get(said.severity, "") + said.message
            if self._in_place and isinstance(self.parent, Widget):
                words = self._fitted(
                    words, max(20, self.parent.size.width - 2)
                )  # it has no size of its own while it is not seen
            self.update(Text(words, style="bold"))
        if self._in_place:
            self.visible = said is not None
        else:
            self.display = said is not None

    def _fitted(self, words: str, width: int) -> str:
        """The words, with an end put to them where they need more than the most lines; takes as many lines as they need."""
        lines = textwrap.wrap(words, width)
        if len(lines) > _MOST_LINES:
            words = " ".join(lines[:_MOST_LINES])[: -len(_MORE)] + _MORE
        needed = min(_MOST_LINES, max(_LEAST_LINES, len(lines)))
        if needed != self._lines:
            self._lines = self.styles.height = needed
        return words
