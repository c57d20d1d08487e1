"""A line to type in, at the bottom of the main screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input, Static

if TYPE_CHECKING:
    from dtype_tui.state.experiment import Preview


class BottomPrompt(Vertical):
    """A docked line with a hint below it: what the text would do. Hidden until it is opened."""

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

    class Cancelled(Message):
        """The prompt was closed, and nothing is to be done."""

    def __init__(self, id: str, placeholder: str = "") -> None:
        super().__init__(id=id)
        self._placeholder = placeholder

    def compose(self) -> ComposeResult:
        yield Input(placeholder=self._placeholder, id=f"{self.id}-input", select_on_focus=False, compact=True)
        yield Static(id=f"{self.id}-hint", markup=False)

    @property
    def field(self) -> Input:
        """The line itself."""
        return self.query_one(Input)

    @property
    def is_open(self) -> bool:
        """Whether the prompt is shown."""
        return self.has_class("open")

    def show_with(self, text: str) -> None:
        """Show the prompt with `text` in its line; keys go there."""
        self.add_class("open")
        self.put(text)
        self.screen.set_focus(self.field)

    def put(self, text: str) -> None:
        """Replace what stands in the line; the cursor goes to its end."""
        self.field.value = text
        self.field.cursor_position = len(text)

    def hint(self, words: Text) -> None:
        """Replace the line below."""
        self.query_one(f"#{self.id}-hint", Static).update(words)

    def close(self) -> None:
        """Hide the prompt, and what it lit up in the tree."""
        self.remove_class("open")
        self.post_message(self.Previewed(None))

    def action_cancel(self) -> None:
        self.close()
        self.post_message(self.Cancelled())
