"""The base class of the side panes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

if TYPE_CHECKING:
    from dtype_tui.state.experiment import Experiment


class Pane(VerticalScroll, can_focus=False):
    """A side pane: a titled box with a text about the experiment, which a subclass writes."""

    HELP = ""
    """The text that explains the terms of this pane in the help."""

    DEFAULT_CSS = """
    Pane { border: round $surface-lighten-2; border-title-color: $accent; padding: 0 0 0 1; height: auto;
        scrollbar-size-vertical: 1; }
    Pane > Static { height: auto; }
    """

    def __init__(self, experiment: Experiment, title: str, id: str) -> None:
        super().__init__(id=id)
        self.experiment = experiment
        self.border_title = title
        self._shown: list[list[Segment]] = []
        self._shown_for = ("", "")

    def compose(self) -> ComposeResult:
        yield Static(id=f"{self.id}-text", markup=False)

    def show(self, activity: str = "", node: str = "") -> None:
        """Redraw the pane if its text has changed.

        activity: what the engine is doing, in a few words, or "" if it is idle. node: the name of the node under the cursor.
        """
        self._shown_for = (activity, node)
        if not self.is_mounted or not self.display:
            return
        drawn = self.draw(activity, node)
        console = self.app.console
        lines = console.render_lines(drawn, console.options.update(width=self.columns, height=None))
        if lines != self._shown:
            as_high = len(lines) == len(self._shown)  # a new layout of the screen takes longer than drawing the text
            self._shown = lines
            self.query_one(Static).update(drawn, layout=not as_high)

    def on_resize(self) -> None:
        self.query_one(Static).styles.width = self.columns
        self.show(*self._shown_for)

    def draw(self, activity: str, node: str) -> Text | Table:
        raise AssertionError("each pane draws itself")

    @property
    def columns(self) -> int:
        """The width in cells that is available for text. It is the same with and without a scrollbar, for which one cell is
        reserved.
        """
        return max(20, self.size.width - 1)
