"""The line with the last sentence that the app had to say."""

from __future__ import annotations

from rich.text import Text
from textual.notifications import Notification
from textual.widgets import Static

_MARKS = {"warning": "⚠ ", "error": "⚠ "}


class MessageLine(Static):
    """It takes lines of its own, so it covers neither keys nor a window's words; with nothing to say it takes none."""

    DEFAULT_CSS = """
    MessageLine { split: bottom; display: none; height: auto; max-height: 3; padding: 0 1; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)

    def show(self, said: Notification | None) -> None:
        """Show what was said, or nothing."""
        self.display = said is not None
        if said is not None:
            self.update(Text(_MARKS.get(said.severity, "") + said.message, style="bold"))
