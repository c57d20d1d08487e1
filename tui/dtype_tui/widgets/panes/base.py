"""The base class of the panes: a frame with a title, and lines of text inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.console import RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from dtype_tui.rendering.palette import ACCENT, TRACK

if TYPE_CHECKING:
    from dtype_tui.state.experiment import Experiment

_PLAIN = Style()
_EDGE = 2
"""Width in cells of one side of the frame, with the blank next to the text. Also the number of lines of the two other edges."""


class Pane(Widget, can_focus=True):
    """A frame with a title and, inside it, lines about the experiment, which a subclass draws. If panes are shown one at a time
    below a line of tabs, they have no frame.

    Only changed lines are painted again. The height of a pane does not depend on its lines: if more lines exist than fit, the lower
    edge says how many follow, and keys and the mouse wheel scroll.
    """

    TITLE: ClassVar[str]
    CORNER: ClassVar[str] = ""
    """The text at the right end of the upper edge, unless `corner` returns another."""
    HELP = ""
    """The text that explains the terms of this pane in the help."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "step(-1)", "Up", show=False),
        Binding("down,j", "step(1)", "Down", show=False),
        Binding("tab", "screen.next_pane", "Next pane", show=False),
        Binding("escape", "screen.to_tree", "Back to the tree", show=False),
    ]

    @dataclass
    class Chosen(Message):
        """Posted when the user has clicked the pane or moved the focus to it."""

        pane: Pane

    def __init__(self, experiment: Experiment, id: str) -> None:
        super().__init__(id=id)
        self.experiment = experiment
        self.first = 0
        self._shown: list[list[Segment]] = []
        self._shown_for = ("", "")
        self.corner_text = Text()
        self._painted: list[Strip] = []
        self._painted_look: tuple[object, ...] = ()
        """Everything that `_painted` depends on. If this is unchanged, no line has to be drawn again."""

    def draw(self, activity: str, node: str) -> RenderableType:
        """Return what the pane shows. activity: what the engine is doing, or "". node: the name of the node under the cursor."""
        raise AssertionError("each pane draws itself")

    def corner(self, activity: str) -> Text:
        """Return the text at the right end of the upper edge, such as `6 of 6 sequences`."""
        return Text(self.CORNER, "dim")

    # -- layout --------------------------------------------------------------------------------------------------

    @property
    def is_framed(self) -> bool:
        return not self.has_class("tab")

    @property
    def is_zoomed(self) -> bool:
        return self.has_class("zoomed")

    @property
    def columns(self) -> int:
        """The width in cells that is available for text."""
        return max(20, self.size.width - (2 * _EDGE if self.is_framed else 2))

    @property
    def lines(self) -> int:
        """The number of lines that are available for text."""
        return max(1, self.size.height - (_EDGE if self.is_framed else 0))

    # -- drawing -------------------------------------------------------------------------------------------------

    def show(self, activity: str = "", node: str = "") -> None:
        """Draw the pane again if its text has changed. The arguments are those of `draw`."""
        self._shown_for = (activity, node)
        if not self.is_mounted or not self.region:
            return
        console = self.app.console
        options = console.options.update(width=self.columns, height=None)
        self.corner_text = self.corner(activity)
        self._shown = console.render_lines(self.draw(activity, node), options, pad=False)
        self._paint_changes()

    def show_again(self) -> None:
        self.show(*self._shown_for)

    def on_resize(self) -> None:
        self._painted, self._painted_look = [], ()
        self.show_again()
        self.refresh()

    def watch_has_focus(self, has_focus: bool) -> None:
        """Redraw the pane, and tell the main screen if the pane got the focus."""
        if has_focus:
            self.post_message(self.Chosen(self))
        self.show_again()

    def _paint_changes(self) -> None:
        self.first = max(0, min(self.first, len(self._shown) - self.lines))
        corner = (self.corner_text, self.corner_text.style)
        look = (self._shown, corner, self.first, self.has_focus, self.is_framed, self.size)
        if look == self._painted_look:
            return
        self._painted_look = look
        before, self._painted = self._painted, [self._line(y).simplify() for y in range(self.size.height)]
        if len(before) != len(self._painted):
            self.refresh()
            return
        for y, (old, new) in enumerate(zip(before, self._painted, strict=True)):
            if old != new:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        strip = self._painted[y] if y < len(self._painted) else Strip.blank(self.size.width)
        return strip.apply_style(Style(color=base.color, bgcolor=base.bgcolor))

    def _line(self, y: int) -> Strip:
        width = self.size.width
        if not self.is_framed:
            return self._text_line(y).adjust_cell_length(width, _PLAIN)
        style = Style(color=ACCENT if self.has_focus else TRACK)
        if y == 0:
            return self._edge(("╭─", "─╮"), Text(f" {self.TITLE} ", f"bold {ACCENT}"), self.corner_text, style)
        if y == self.size.height - 1:
            more = len(self._shown) - self.first - self.lines
            return self._edge(("╰─", "─╯"), Text(), Text(f"{more} more" if more > 0 else "", "dim"), style)
        inside = self._text_line(y - 1).adjust_cell_length(self.columns, _PLAIN)
        return Strip([Segment("│ ", style), *inside, Segment(" │", style)]).adjust_cell_length(width)

    def _text_line(self, row: int) -> Strip:
        index = self.first + row
        left = [] if self.is_framed else [Segment(" ")]
        if not self.is_framed and row == self.lines - 1 and len(self._shown) > index + 1:
            more = len(self._shown) - index
            return Strip([Segment(f" {more} more lines: + shows the pane alone", Style(dim=True))])
        return Strip([*left, *self._shown[index]] if index < len(self._shown) else left)

    def _edge(self, corners: tuple[str, str], left: Text, right: Text, style: Style) -> Strip:
        """Return the upper or lower edge of the frame, with text at its left and right, or only at its left if both do not fit."""
        room = self.size.width - 2 * _EDGE - left.cell_len
        if right.cell_len > room - 3:
            right = Text()
        if right.cell_len:
            right = Text.assemble(" ", right, " ")
        line = "─" * max(0, room - right.cell_len)
        text = Text.assemble((corners[0], style), left, (line, style), right, (corners[1], style))
        return Strip(text.render(self.app.console), None).adjust_cell_length(self.size.width)

    # -- scrolling -----------------------------------------------------------------------------------------------

    def action_step(self, step: int) -> None:
        self.first += step
        self._paint_changes()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_step(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_step(-1)
