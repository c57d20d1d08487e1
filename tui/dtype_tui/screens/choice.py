"""The base class of windows in which the user chooses a line."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from dtype_tui.screens.modal import ModalScreen, Result
from dtype_tui.widgets.cursor import EDGE, EDGE_STYLE, cursor_style


class ChoiceScreen(ModalScreen[Result]):
    """A window of lines, one of which the user chooses. A subclass draws the lines in `draw` and binds keys to `action_move`."""

    HEADING: ClassVar[str]
    """The title in the upper border."""
    KEYS: ClassVar[str]
    """The keys in the lower border."""

    DEFAULT_CSS = """
    ChoiceScreen { align: center middle; }
    ChoiceScreen > VerticalScroll { width: 94%; max-width: 100; height: auto; max-height: 90%; border: round $accent;
        padding: 0 1; background: $surface; }
    ChoiceScreen Static { height: auto; }
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self.index = 0

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False) as box:
            box.border_title = self.HEADING
            box.border_subtitle = self.KEYS
            yield from self.compose_box()

    def compose_box(self) -> ComposeResult:
        yield Static(markup=False)

    def on_mount(self) -> None:
        self.redraw()

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)

    @property
    def lines(self) -> Static:
        """The widget that shows the lines. A subclass may add other widgets."""
        return self.query_one("VerticalScroll > Static", Static)

    def draw(self) -> Text | Table:
        """Return the text of all lines, each of which begins with its `marker`."""
        raise NotImplementedError

    def redraw(self) -> None:
        whole = self.draw()
        if isinstance(whole, Table):  # which styles the row of the cursor itself
            self.lines.update(whole)
            return
        drawn = whole.split("\n", allow_blank=True)
        for line in drawn:
            if line.plain.startswith(EDGE):
                line.pad_right(max(0, self.lines.size.width - line.cell_len))
                line.stylize_before(cursor_style(self))
                line.stylize(EDGE_STYLE, 0, 1)
        self.lines.update(Text("\n").join(drawn))

    def marker(self, index: int) -> tuple[str, str]:
        """Return (text, style) of the beginning of a line: the edge of the cursor if the line is chosen, else blanks."""
        return f"{EDGE} " if index == self.index else "  ", ""

    def action_move(self, step: int) -> None:
        self.index = (self.index + step) % self._count
        self.redraw()
