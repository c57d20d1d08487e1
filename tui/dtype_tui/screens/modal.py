"""Windows over the main screen that close once.

Textual's own `dismiss` takes the topmost screen off, whichever that is: two clicks beside the palette, or two keys in one burst,
that both close a window reach it before it is gone, and the second would take off the screen below, in the end the last one.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from textual import on
from textual.app import App, ScreenStackError
from textual.await_complete import AwaitComplete
from textual.command import CommandPalette as _CommandPalette
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.screen import ModalScreen as _ModalScreen
from textual.screen import Screen
from textual.widgets import Input
from textual.worker import WorkerError

Result = TypeVar("Result")


def is_from_closed_window(error: Exception, app: App[Any]) -> bool:
    """Whether an error comes from a query in a window that was closed meanwhile or is not composed yet, or in an app without
    windows. One burst of keys that opens and closes a window does that; the app passes over such errors.
    """
    if app._exit and isinstance(error, (NoMatches, ScreenStackError)):
        return True
    if isinstance(error, ScreenStackError):
        return not any(app._screen_stacks.values())  # the app itself is ending
    if not isinstance(error, NoMatches):
        return False
    nodes = nodes_in_traceback(error)
    if not nodes:
        return False
    above = [node for node in nodes[-1].ancestors_with_self if isinstance(node, Screen)]
    return not any(screen in app.screen_stack and screen.is_mounted and screen.children for screen in above)


def nodes_in_traceback(error: Exception) -> list[DOMNode]:
    """The widgets and windows whose methods are in an error's traceback, the outermost first. The message pump alone does not
    name the window where the error arose in a task of the app.
    """
    asked = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [node for node in asked if isinstance(node, DOMNode) and not isinstance(node, App)]


def _close_once(
    screen: Screen[Result], dismiss: Callable[[Result | None], AwaitComplete], result: Result | None
) -> AwaitComplete:
    """Dismiss a screen only where it is the topmost one."""
    if screen.is_active:
        return dismiss(result)
    return AwaitComplete()


class ModalScreen(_ModalScreen[Result]):
    """A window over the main screen. To close it twice is to close it once."""

    def dismiss(self, result: Result | None = None) -> AwaitComplete:
        return _close_once(self, super().dismiss, result)

    def show_figures(self) -> None:
        """Show what the engine has told meanwhile. The main screen calls this, as often as it draws such figures itself."""

    def action_leave(self) -> None:
        self.dismiss()

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


class CommandPalette(_CommandPalette):
    """Textual's palette. To close it twice is to close it once."""

    def dismiss(self, result: None = None) -> AwaitComplete:
        return _close_once(self, super().dismiss, result)

    @on(Input.Submitted)
    async def choose_once_searched(self, event: Input.Submitted) -> None:
        """Enter, maybe typed together with the words: Textual would run what the search for fewer of them has listed."""
        event.prevent_default()
        event.stop()
        for search in [worker for worker in self.workers if worker.node is self]:
            with contextlib.suppress(WorkerError):  # one for fewer of the words, that was given up
                await search.wait()
        self._select_or_command(event)

    def _action_command_list(self, action: str) -> None:
        # Textual's list may be empty by the time that a key for it is looked at: a search has begun.
        with contextlib.suppress(KeyError, IndexError, NoMatches):
            super()._action_command_list(action)
