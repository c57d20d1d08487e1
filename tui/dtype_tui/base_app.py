"""The base class of the app and the model picker: colors, ASCII mode, messages, keys, and the exit after an unexpected error."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

from rich.segment import Segment
from rich.text import Text
from textual.app import App, ReturnType
from textual.await_complete import AwaitComplete
from textual.color import Color
from textual.command import CommandList
from textual.driver import Driver
from textual.events import Event, Key, MouseEvent, Paste
from textual.filter import NoColor
from textual.message import Message
from textual.notifications import Notification
from textual.widget import AwaitMount, Widget
from textual.widgets import Input
from textual.worker import WorkerFailed

from dtype_engine.cli.program import TRACEBACK, unexpected
from dtype_tui.config.ascii import AsciiFilter, wants_ascii
from dtype_tui.config.config import Config
from dtype_tui.process import textual_private
from dtype_tui.process.crash_log import recorded
from dtype_tui.process.key_parser import KeyParser
from dtype_tui.process.short_frames import with_short_frames
from dtype_tui.process.terminal import without_broken_pipes
from dtype_tui.rendering.palette import DARK, LIGHT, cursor_variables, default_theme, themes
from dtype_tui.rendering.printable_lines import PrintableLines
from dtype_tui.widgets.message_line import MessageLine

MOST_MESSAGES = 200
READ_S = 4.0
"""Minimum seconds that a message is shown. After this time, the next key press removes it; Escape removes it at any time."""


class BaseApp(App[ReturnType]):
    """Draws with the configured theme and characters, and exits with a single sentence after an unexpected error.

    If DTYPE_TUI_TRACEBACK is set, Textual shows a traceback of hundreds of lines instead. An error in Textual's command palette
    only closes the palette, and a click that raises an error is ignored; both are reported and written to a file.

    Messages appear in a line of the topmost window until they are read. Textual's toasts would cover widgets, and disappear unread.
    """

    NOTIFICATION_TIMEOUT = math.inf

    def __init__(self, config: Config) -> None:
        super().__init__()
        textual_private.use_parser(KeyParser)
        for theme in themes(self.console.color_system):
            self.register_theme(theme)
        self.set_reactive(App.ansi_theme_dark, DARK)  # applied when `self.theme` is set below
        self.set_reactive(App.ansi_theme_light, LIGHT)
        self.theme = config.theme or default_theme(self.console.color_system)
        textual_private.add_filters(self, PrintableLines(), *([AsciiFilter()] if wants_ascii(config.ascii) else []))
        if self.no_color:
            textual_private.add_filters(self, _NoColors(self))
        self._read: Notification | None = None
        """The last message that the user has read."""

    def get_driver_class(self) -> type[Driver]:
        return with_short_frames(without_broken_pipes(super().get_driver_class()))

    def get_css_variables(self) -> dict[str, str]:
        """Return the style sheets' variables. Those of the cursor are left out in a theme of the terminal's own colors."""
        theme = self.current_theme
        own = {} if theme.ansi else {**cursor_variables(theme.dark, self.console.color_system), **theme.variables}
        self.theme_variables = {**super().get_css_variables(), **own}
        return self.theme_variables

    def refresh_css(self, animate: bool = True) -> None:
        """Apply the theme's colors. While there is no screen, only set the variables; the first screen parses the style sheets."""
        if self.screen_stack:
            super().refresh_css(animate)
        else:
            self.stylesheet.set_variables(self.get_css_variables())

    @property
    def messages(self) -> list[Notification]:
        """All messages, the oldest first."""
        return textual_private.messages_of(self)

    def _refresh_notifications(self) -> None:
        """Show the newest message, if it is unread, instead of Textual's toasts. Textual calls this after every new message, and
        when the topmost window changes.
        """
        said = self.messages
        for old in said[:-MOST_MESSAGES]:
            textual_private.forget_message(self, old)
        if not self.screen_stack or self.return_code is not None:
            return  # while the app ends, nothing can be mounted
        newest = said[-1] if said and said[-1] is not self._read else None
        line = next(iter(self.screen.query(MessageLine)), None)
        if line is None and newest is not None:
            line = MessageLine()
            self.screen.mount(line)
        if line is not None:
            line.show(newest)

    def _note_read(self, surely: bool) -> None:
        """Mark the newest message as read if it was shown for at least `READ_S` seconds. surely: mark it in any case."""
        said = self.messages
        if not said or said[-1] is self._read:
            return
        if surely or not 0 <= time.time() - said[-1].raised_at <= READ_S:  # below 0 if the clock was set back
            self._read = said[-1]
            self._refresh_notifications()

    def withdraw(self, message: str) -> None:
        """Stop showing the message with this text, if it is the newest."""
        if self.messages and self.messages[-1].message == message:
            self._note_read(True)

    def on_driver_signal_resume(self) -> None:
        """Redraw everything after a suspend: the terminal has cleared the screen, but Textual would draw only the changes."""
        if self.screen_stack:
            self.screen.refresh()

    def action_repaint(self) -> None:
        self.screen.refresh()

    @property
    def quit_words(self) -> str:
        return "Esc quits"

    def action_help_quit(self) -> None:
        """After Ctrl+C, tell the user which key quits. Textual's own message has markup and names a key that is not in use."""
        self.notify(self.quit_words, markup=False)

    def pop_screen(self) -> AwaitComplete:
        closed = super().pop_screen()
        textual_private.forget_drawings()
        return closed

    async def on_event(self, event: Event) -> None:
        """Handle a key completely before the next event.

        Textual passes a key from the focused widget to its parents, through a queue at each step. If keys arrive together, later
        keys would be handled before earlier keys have taken effect.
        """
        if not isinstance(event, (Key, Paste)) or event.is_forwarded or self.screen.maximized is not None:
            await super().on_event(event)
            return
        if self.return_code is not None:
            return  # the app is ending, so keys after the one that quits are ignored
        while not self.screen.is_mounted:  # a previous key or the engine is just opening this window
            await AwaitMount(self.screen, [self.screen])
        if isinstance(event, Key):
            self.app_focus = True
            self._note_read(event.key == "escape")
            await self._take_key(event)
        elif isinstance(event, Paste) and isinstance(self.focused, Input):
            textual_private.paste_into(self.focused, event)

    async def _take_key(self, key: Key) -> None:
        """Handle a key at once, in Textual's order: priority bindings, text input, then bindings from the focus outwards."""
        if await textual_private.run_bound(self, key, priority=True):
            return
        without_alt = _after_escape(key)
        if without_alt is None and key.is_printable and isinstance(self.focused, Input):
            await textual_private.type_into(self.focused, key)
            return
        if key.key == "escape":
            self.screen.clear_selection()
        if not await textual_private.run_bound(self, key) and without_alt is not None:
            await self._take_key(Key("escape", "\x1b"))
            await self._take_key(without_alt)

    async def _dispatch_message(self, message: Message) -> None:
        try:
            await super()._dispatch_message(message)
        except Exception as error:
            from dtype_tui.screens.modal import is_from_closed_window

            if is_from_closed_window(error, self):
                return
            if not isinstance(message, MouseEvent):
                raise
            self._pass_over(error, "the click was ignored")

    def _handle_exception(self, error: Exception) -> None:
        from dtype_tui.screens.modal import CommandPalette, is_from_closed_window, nodes_in_traceback

        if isinstance(error, WorkerFailed) and isinstance(error.error, Exception):
            # The palette's search runs in a task, whose errors arrive in a wrapper without a traceback.
            error = error.error
        pump = textual_private.active_message_pump.get(None)
        if is_from_closed_window(error, self):
            return
        above = pump.ancestors_with_self if isinstance(pump, Widget) else []
        palette = next(
            (node for node in (*above, *nodes_in_traceback(error)) if isinstance(node, CommandPalette)), None
        )
        if palette is not None or isinstance(pump, CommandList):
            self._pass_over(error, "the palette was closed")
            if palette is not None:
                palette.dismiss()
            return
        super()._handle_exception(error)

    def _pass_over(self, error: Exception, what: str) -> None:
        self.notify(f"{what}: {unexpected(error)}{recorded(error)}", severity="error", markup=False)

    def _fatal_error(self) -> None:
        error = sys.exc_info()[1] or textual_private.error_of(self)
        if os.environ.get(TRACEBACK) or error is None:
            super()._fatal_error()
            return
        words = f"{self.title.partition(' ')[0] or 'dtype-tui'}: {unexpected(error)}{recorded(error)}"
        textual_private.end_by_error(self, Text(words, overflow="fold"))


class _NoColors(NoColor):
    """With NO_COLOR, drop the terminal's own colors in a theme that has them. Textual turns all colors to gray, and these to black
    on black.
    """

    def __init__(self, app: App[Any]) -> None:
        super().__init__()
        self._app = app

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return super().apply(segments, background) if self._app.native_ansi_color else segments


def _after_escape(key: Key) -> Key | None:
    """Return the key without Alt, such as j for alt+j: most terminals send the same bytes for alt+j as for Escape followed by j.
    Returns None for keys without Alt, and if the terminal distinguishes the two; alt+j then has no character.
    """
    return Key(key.character, key.character) if key.key.startswith("alt+") and key.character else None
