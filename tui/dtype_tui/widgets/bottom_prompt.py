"""A line to type in, at the bottom of the main screen."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from dtype_tui.widgets.line_input import LineInput

if TYPE_CHECKING:
    from dtype_tui.state.preview import Preview


class BottomPrompt(Vertical):
    """A docked line with a hint below it: what the text would do. Hidden until it is opened; of several, one is open at a time.

    A subclass says in `typed` and `entered` what follows.
    """

    DEFAULT_CSS = """
    BottomPrompt { dock: bottom; height: 2; display: none; background: $surface; }
    BottomPrompt.open { display: block; }
    BottomPrompt Static { height: 1; }
    BottomPrompt Input { margin: 0 1; }
    """

    @dataclass
    class Previewed(Message):
        """What the rule in the line would take; None while there is no rule in it."""

        preview: Preview | None

    def __init__(self, id: str, placeholder: str = "") -> None:
        super().__init__(id=id)
        self.field = LineInput(f"{id}-input", self.entered, self.typed, placeholder)
        """The line itself."""
        self.field.cursor_blink = False  # every blink goes over the wire
        self._focused_before: Widget | None = None

    def compose(self) -> ComposeResult:
        yield self.field
        yield Static(id=f"{self.id}-hint", markup=False)

    def typed(self, line: str) -> None:
        """The text is another now."""
        raise NotImplementedError

    def entered(self, line: str) -> Awaitable[None] | None:
        """Enter was pressed."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        return self.has_class("open")

    def show_with(self, text: str) -> None:
        """Show the prompt with `text` in its line; keys go there. Another one that is open closes: both would stand in one place,
        and keys would go from one that closes to the other.
        """
        for other in self.screen.query(BottomPrompt):
            if other is not self and other.is_open:
                other.close()
        if not self.is_open:
            self._focused_before = self.screen.focused
        self.add_class("open")
        self.field.put(text)
        self.screen.set_focus(self.field)

    def hint(self, words: Text) -> None:
        """Replace the line below."""
        self.query_one(f"#{self.id}-hint", Static).update(words, layout=False)

    def close(self) -> None:
        """Hide the prompt, and what it lit up in the tree; keys go where they went before."""
        self.remove_class("open")
        self.screen.set_focus(self._focused_before)
        self.post_message(self.Previewed(None))

    def action_cancel(self) -> None:
        self.close()
