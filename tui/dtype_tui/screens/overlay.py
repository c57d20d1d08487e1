"""A window that shows a text, such as the result of a job, in a box over the main screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import msgspec
from rich.console import RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from dtype_engine.service.commands import Command
from dtype_tui.screens.modal import ModalScreen

if TYPE_CHECKING:
    from dtype_tui.state.experiment import Experiment

Parameters = TypeVar("Parameters")
Result = TypeVar("Result")


class Answer(msgspec.Struct, Generic[Parameters, Result], frozen=True):
    """The result of a job for the current recipe, with all that a function needs to make a window for it."""

    result: Result
    parameters: Parameters
    """The parameters of the job, or None if it has none."""
    experiment: Experiment
    width: int
    """The width of the screen in cells."""


class Overlay(ModalScreen[Command]):
    """A box of text over the main screen. A window for a result may close with a further question for the engine."""

    KEYS: ClassVar[str] = "Esc closes"
    """The keys, on the border."""
    DEFAULT_CSS = """
    Overlay { align: center middle; }
    Overlay > VerticalScroll { width: 96%; max-width: 100; height: auto; max-height: 90%; border: round $accent; padding: 0 1;
        background: $surface; scrollbar-size-vertical: 1; }
    Overlay Static { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,question_mark", "dismiss", "Close"),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
        Binding("g,less_than_sign", "edge(False)", "First line", show=False),
        Binding("G,greater_than_sign", "edge(True)", "Last line", show=False),
    ]

    def __init__(self, title: str, body: RenderableType) -> None:
        super().__init__()
        self._title = title
        self._body = body

    @staticmethod
    def content_width(width: int) -> int:
        """Return the maximum width in cells of a box's text on a screen of `width` cells."""
        return min(100, 96 * width // 100) - 5  # less the border, the padding and the scrollbar

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = Text(self._title)
            box.border_subtitle = self.KEYS
            yield Static(self._body, markup=False)

    def action_edge(self, last: bool) -> None:
        box = self.query_one(VerticalScroll)
        box.scroll_to(y=box.max_scroll_y if last else 0, animate=False)
