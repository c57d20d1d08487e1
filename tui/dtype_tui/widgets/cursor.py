"""The look of the line under the cursor: a tint, and an edge in the accent color at the left, in the tree and in every list.

Textual's own lists get the tint from the theme's variables `block-cursor-*`; see `palette.cursor_variables`.
"""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from dtype_tui.rendering.palette import ACCENT

EDGE = "▌"
EDGE_STYLE = Style(color=ACCENT)
_REVERSED = Style(reverse=True, dim=False, color="default")
"""For themes of the terminal's own colors. Dim or colored text would have another background when it is reversed."""


def cursor_style(widget: Widget) -> Style:
    """Return the style of the line under the cursor: the theme's tint or, in a theme of the terminal's own colors, reversed. No
    text is dim on this line, because each change of style costs bytes when the cursor moves.
    """
    if widget.app.native_ansi_color:
        return _REVERSED
    return Style(dim=False, bgcolor=widget.app.theme_variables["block-cursor-background"])


def over_cursor(widget: Widget, segments: list[Segment]) -> Strip:
    """Return a line of a list as it is drawn under the cursor: tinted, except badges, which keep their colors. segments: the line,
    which begins with the mark at the cursor's left edge. widget: the list.
    """
    over = cursor_style(widget)
    kept = segments[:1] if over.reverse else []
    return Strip([*kept, *(_laid_over(segment, over) for segment in segments[len(kept) :])])


def _laid_over(segment: Segment, over: Style) -> Segment:
    style = segment.style
    if style is None:
        return Segment(segment.text, over)
    return segment if style.bgcolor is not None else Segment(segment.text, style + over)
