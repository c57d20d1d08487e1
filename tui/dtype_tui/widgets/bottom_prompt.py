"""The base class of the prompts at the bottom of the main screen."""

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
    """An input line with a hint below it, which says what the typed text would do. It is hidden until opened. Only one prompt is
    open at a time.

    A subclass implements `typed` and `entered`.
    """

    DEFAULT_CSS = """
    BottomPrompt { dock: bottom; height: 2; display: none; background: $surface; }
    BottomPrompt.open { display: block; }
    BottomPrompt Static { height: 1; }
    BottomPrompt Input { margin: 0 1; }
    """

    @dataclass
    class Previewed(Message):
        """Posted when the text has changed. preview: what the rule in the line would do, or None if the text is not a rule."""

        preview: Preview | None

    def __init__(self, id: str, placeholder: str = "") -> None:
        super().__init__(id=id)
        self.field = LineInput(f"{id}-input", self.entered, self.typed, placeholder)
        """The input line."""
        self.field.cursor_blink = False  # every blink costs bytes on a slow connection
        self._focused_before: Widget | None = None

    def compose(self) -> ComposeResult:
        yield self.field
        yield Static(id=f"{self.id}-hint", markup=False)

    def typed(self, line: str) -> None:
        """Handle the text. Called whenever the user has changed it."""
        raise NotImplementedError

    def entered(self, line: str) -> Awaitable[None] | None:
        """Handle the text that the user confirms with Enter."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        return self.has_class("open")

    def show_with(self, text: str) -> None:
        """Show the prompt with `text` in its line, and focus the line.

        Another open prompt is closed first. Otherwise both would be in the same place, and one would return the focus to the other.
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
        """Replace the hint below the line."""
        self.query_one(f"#{self.id}-hint", Static).update(words, layout=False)

    def close(self) -> None:
        """Hide the prompt and its preview in the tree, and return the focus to the widget that had it before."""
        self.remove_class("open")
        self.screen.set_focus(self._focused_before)
        self.post_message(self.Previewed(None))

    def action_cancel(self) -> None:
        self.close()
