"""The panel of the tour at the bottom of the main screen or a window: what to press next, and why."""

from __future__ import annotations

from textual.widgets import Static


class TourPanel(Static):
    """The panel that shows the tour's step. It covers nothing: the widgets above it become smaller."""

    DEFAULT_CSS = """
    TourPanel { split: bottom; height: auto; border-top: solid $accent; border-title-color: $accent; padding: 0 1;
        background: $background; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)

    def show(self, heading: str, words: str) -> None:
        """Show a heading and a text. Redraws only if they have changed, since a redraw costs bytes on a slow connection."""
        if self.border_title != heading:
            self.border_title = heading
        if self.content != words:
            self.update(words)
