"""Labels over the main screen. The user types a label to go to its pane or its row of the tree."""

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
"""The letters of labels, the easiest to type first."""


def labels(count: int) -> list[str]:
    """Return `count` labels, such as ["a", "s", "ma"]. No label begins with another. As many as possible have one letter."""
    pairs = max(0, -(-(count - len(LETTERS)) // (len(LETTERS) - 1)))
    singles = len(LETTERS) - pairs
    return [*LETTERS[:singles], *map("".join, product(LETTERS[singles:], LETTERS))][:count]


class JumpScreen(ModalScreen[int]):
    """Shows a label at each of `places`. The window's result is the index of the place whose label is typed. places: in cells from
    the screen's upper left corner.
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
        yield LineInput("jump-label", lambda _: None, self._go, "the label of a row or a pane  Esc closes")

    def on_resize(self, event: events.Resize) -> None:
        if event.size != self._size:
            self.dismiss()  # after a resize, the labels would be in the wrong places

    def _go(self, typed: str) -> None:
        """Go to the place with the typed label. If labels begin with the typed letters, show only these labels; otherwise, clear
        the line and show all.
        """
        if typed in self._statics:
            self.dismiss(list(self._statics).index(typed))
            return
        left = [label for label in self._statics if label.startswith(typed)]
        if not left:
            self.query_one(LineInput).put("")
        for label, static in self._statics.items():
            static.display = label in left or not left
