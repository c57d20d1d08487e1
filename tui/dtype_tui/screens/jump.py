"""The labels over the main screen: the user types one to go to a pane or to a row of the tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Offset
from textual.widgets import Static

from dtype_tui.screens.modal import ModalScreen
from dtype_tui.widgets.line_input import LineInput

LETTERS = "asdfghjklqwertyuiopzxcvbnm"
"""The letters of labels. Those of the home row come first, because they are typed most easily."""


def labels(count: int) -> list[str]:
    """Return `count` different labels, of which none is the beginning of another: as many of one letter as possible, first."""
    pairs = max(0, -(-(count - len(LETTERS)) // (len(LETTERS) - 1)))
    singles = len(LETTERS) - pairs
    return [*LETTERS[:singles], *map("".join, product(LETTERS[singles:], LETTERS))][:count]


class JumpScreen(ModalScreen[int]):
    """Puts a label on each place of the screen below. The result is the index of the place whose label the user types.

    places: where the labels begin, in cells from the upper left corner of the screen.
    """

    DEFAULT_CSS = """
    JumpScreen, JumpScreen:ansi { background: transparent; }
    JumpScreen > .label { position: absolute; width: auto; height: 1; background: $accent; color: $background; text-style: bold; }
    JumpScreen > .label:ansi { text-style: bold reverse; }
    JumpScreen > LineInput { dock: bottom; height: 1; background: $panel; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Close", priority=True)]

    def __init__(self, places: Sequence[Offset]) -> None:
        super().__init__()
        self._places = places
        self._statics = {label: Static(label, classes="label", markup=False) for label in labels(len(places))}
        self._size = self.app.size

    def compose(self) -> ComposeResult:
        for place, static in zip(self._places, self._statics.values(), strict=True):
            static.styles.offset = place.x, place.y
            yield static
        yield LineInput("jump-label", lambda _: None, self._go, "the label of a row or a pane   Esc: close")

    def on_resize(self, event: events.Resize) -> None:
        if event.size != self._size:
            self.dismiss()  # the places have moved

    def _go(self, typed: str) -> None:
        """Go to the place with the label that was typed. While there are several, show only those that begin so."""
        if typed in self._statics:
            self.dismiss(list(self._statics).index(typed))
            return
        left = [label for label in self._statics if label.startswith(typed)]
        if not left:
            self.query_one(LineInput).put("")
        for label, static in self._statics.items():
            static.display = label in left or not left
