"""An input line that calls functions at once when its text changes or Enter is pressed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Paste
from textual.widgets import Input
from textual.widgets.input import Selection

from dtype_engine.core.text import printable

MOST_PASTED = 100_000
"""Maximum number of characters of a pasted line. Each key takes longer in a longer line."""


class LineInput(Input):
    """Textual's input line, which calls functions instead of posting messages: a message would be handled only after the next key,
    if several keys arrive together.

    entered: called with the text when Enter is pressed. typed: called with the text whenever it has changed.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        # For terminals that distinguish alt+b from Escape and b. For others, Textual has bindings for the first two.
        Binding("alt+b", "cursor_left_word", "Move cursor left a word", show=False),
        Binding("alt+f", "cursor_right_word", "Move cursor right a word", show=False),
        Binding("alt+d", "delete_right_word", "Delete right to start of word", show=False),
        # As in shells. Textual deletes to the right.
        Binding("ctrl+backspace,alt+backspace", "delete_left_word", "Delete left to start of word", show=False),
    ]

    def __init__(
        self,
        id: str,
        entered: Callable[[str], Awaitable[None] | None],
        typed: Callable[[str], None] = lambda text: None,
        placeholder: str = "",
    ) -> None:
        super().__init__(placeholder=placeholder, id=id, select_on_focus=False, compact=True)
        self._entered = entered
        self._typed = typed

    def watch_value(self, text: str) -> None:
        self._typed(text)

    async def action_submit(self) -> None:
        if (done := self._entered(self.value)) is not None:
            await done

    def _on_paste(self, event: Paste) -> None:
        """Insert the first pasted line that is not blank: up to `MOST_PASTED` characters, with control characters escaped."""
        event.stop()
        event.prevent_default()  # otherwise Textual's own method would also handle the message
        lines = [line for line in event.text.splitlines() if line.strip()]
        line = lines[0][:MOST_PASTED] if lines else ""
        super()._on_paste(Paste(printable(line, len(line))) if lines else event)
        if lines and len(lines[0]) > MOST_PASTED:
            words = f"pasted the first {MOST_PASTED:,} characters of {len(lines[0]):,}: the rest is left out"
            self.notify(words, severity="warning", markup=False)
        if len(lines) > 1:
            rest = f"{len(lines) - 1:,} others are" if len(lines) > 2 else "other is"
            words = f"pasted the first line; the {rest} left out: paste one at a time"
            self.notify(words, severity="warning", markup=False)

    def action_copy(self) -> None:
        """Copy the selected text, and say which key quits, because a user who presses Ctrl+C may want to quit."""
        super().action_copy()
        self.app.action_help_quit()

    def put(self, text: str, select: bool = False) -> None:
        """Replace the text, and move the cursor to its end. select: also select the text, so that typing replaces it."""
        self.value = text
        self.selection = Selection(0 if select else len(text), len(text))
