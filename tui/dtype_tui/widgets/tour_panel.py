"""Some lines at the bottom of the main screen or of a window: what to press next, and why."""

from __future__ import annotations

from textual.widgets import Static


class TourPanel(Static):
    """Takes its lines from what is above it, and covers nothing."""

    DEFAULT_CSS = """
    TourPanel { split: bottom; height: auto; border-top: solid $accent; border-title-color: $accent; padding: 0 1;
        background: $background; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)

    def show(self, heading: str, words: str) -> None:
        """Show this, if it says anything new: what is drawn again goes over the wire again."""
        if self.border_title != heading:
            self.border_title = heading
        if self.content != words:
            self.update(words)
