"""Divides the lines of the screen, so that a change in the middle of a widget's line is not written from the line's beginning."""

from __future__ import annotations

from collections.abc import Iterator

from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

STEP = 16
"""The distance in cells between two edges."""
_WIDEST = 400
"""The width in cells up to which the screen has edges."""


class Cut(Widget):
    """A part of the screen that other widgets cover. Textual writes changed cells of a line from the left edge of a widget on, but
    also counts the edges of covered widgets. So nothing further than `STEP` cells before a change is written.
    """

    DEFAULT_CSS = f"Cut {{ layer: cuts; position: absolute; width: {STEP}; height: 100%; }}"

    def render_line(self, y: int) -> Strip:
        return Strip.blank(self.size.width, Style())  # without colors, Textual needs a style


def cuts() -> Iterator[Cut]:
    """Yield what divides a screen that has the layers `cuts` and `default`."""
    for column in range(2, _WIDEST, 2 * STEP):
        cut = Cut()
        cut.styles.offset = column, 0
        yield cut
