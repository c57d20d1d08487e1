"""The line with the last sentence that the app had to say."""

from __future__ import annotations

from rich.text import Text
from textual.notifications import Notification
from textual.widgets import Static

_MARKS = {"warning": "⚠ ", "error": "⚠ "}
_MORE = "… (M: all)"


class MessageLine(Static):
    """In a window it takes lines of its own; on the main screen it stands over the end of the panes. So it covers neither keys nor
    a window's words nor the cursor. With nothing to say it is not seen.

    in_place: its lines are there, unseen, all the time: to come and go changes no layout, so nothing else is drawn again.
    """

    DEFAULT_CSS = """
    MessageLine { split: bottom; height: auto; max-height: 3; padding: 0 1; background: $panel; }
    """

    def __init__(self, in_place: bool = False) -> None:
        super().__init__(markup=False)
        self._in_place = in_place
        if in_place:
            self.visible = False
        else:
            self.display = False

    def show(self, said: Notification | None) -> None:
        """Show what was said, as far as there is room for it, or nothing."""
        if said is not None:
            words = _MARKS.get(said.severity, "") + said.message
            room = self.content_size.width * self.content_size.height - 20  # words are not broken at ends of lines
            if self._in_place and len(words) > room > 0:
                words = words[: room - len(_MORE)] + _MORE
            self.update(Text(words, style="bold"))
        if self._in_place:
            self.visible = said is not None
        else:
            self.display = said is not None
