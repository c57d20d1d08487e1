"""The base class of the prompts at the bottom of the main screen."""

from __future__ import annotations

import textwrap
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

_MOST_LINES = 4
"""Maximum number of lines of a hint."""


class BottomPrompt(Vertical):
    """An input line with a hint below it, which says what the typed text would do. The prompt is hidden until it is opened, and
    only one is open at a time.

    It covers the last lines of the screen, first the status line and the line with the keys, which do not apply while the user
    types. If it took lines of its own, all panes would change their heights, which takes twice as long to lay out and draw.
    """

    DEFAULT_CSS = """
    BottomPrompt { overlay: screen; offset-y: -100%; height: auto; display: none; background: $surface; }
    BottomPrompt.open { display: block; }
    BottomPrompt Static { height: 1; }
    BottomPrompt Input { margin: 0 1; }
    """

    class Resized(Message):
        """Posted when `lines` has changed."""

    @dataclass
    class Previewed(Message):
        """Posted when the text has changed. preview: what the rule in the line would do, or None if the line has no rule."""

        preview: Preview | None

    def __init__(self, id: str, placeholder: str = "") -> None:
        super().__init__(id=id)
        self.field = LineInput(f"{id}-input", self.entered, self.typed, placeholder)
        self.field.cursor_blink = False  # every blink costs bytes on a slow connection
        self._focused_before: Widget | None = None
        self._hint_lines = 1

    def compose(self) -> ComposeResult:
        yield self.field
        yield Static(id=f"{self.id}-hint", markup=False)

    def typed(self, line: str) -> None:
        """Handle the text of the input line, whenever the user has changed it."""
        raise NotImplementedError

    def entered(self, line: str) -> Awaitable[None] | None:
        """Handle the text that the user confirms with Enter."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        return self.has_class("open")

    @property
    def lines(self) -> int:
        """Number of lines of the screen that the prompt covers: 0 while it is hidden."""
        return len(self.children) - 1 + self._hint_lines if self.is_open else 0

    def show_with(self, text: str, select: bool = False) -> None:
        """Show the prompt with `text` in its line, and focus the line. select: select the text, so that typing replaces it.

        Another open prompt is closed first: it would be in the same place, and closing one would return the focus to the other.
        """
        for other in self.screen.query(BottomPrompt):
            if other is not self and other.is_open:
                other.close()
        if not self.is_open:
            self._focused_before = self.screen.focused
        self.add_class("open")
        self.post_message(self.Resized())
        self.field.put(text, select)
        self.screen.set_focus(self.field)

    def hint(self, words: Text) -> None:
        """Replace the hint. It is wrapped to at most `_MOST_LINES` lines, or stays on one line if it has `no_wrap`."""
        width = max(20, self.app.size.width - 2)
        shown = words.plain[: 2 * _MOST_LINES * width].strip()  # wrapping a pasted megabyte would take minutes
        lines = [words.plain] if words.no_wrap else textwrap.wrap(shown, width)
        if len(lines) > 1:
            words = Text("\n".join(f" {line}" for line in lines[:_MOST_LINES]), style=words.style)
        widget = self.query_one(f"#{self.id}-hint", Static)
        widget.update(words, layout=False)
        needed = min(_MOST_LINES, max(1, len(lines)))
        if needed != self._hint_lines:
            self._hint_lines = widget.styles.height = needed
            self.post_message(self.Resized())

    def close(self) -> None:
        """Hide the prompt and its preview in the tree, and return the focus to the widget that had it before."""
        self.remove_class("open")
        self.post_message(self.Resized())
        self.screen.set_focus(self._focused_before)
        self.post_message(self.Previewed(None))

    def action_cancel(self) -> None:
        self.close()
