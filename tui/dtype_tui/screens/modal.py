"""The base class of windows over the main screen, which makes sure that a window closes only once.

Textual's own `dismiss` removes the topmost screen, no matter on which screen it is called. Two keys or clicks that close a window
and arrive together would also remove the screen below it, possibly the app's last one.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import RenderableType
from textual import on
from textual.app import App, ScreenStackError
from textual.await_complete import AwaitComplete
from textual.binding import Binding
from textual.command import CommandPalette as _CommandPalette
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.renderables.background_screen import BackgroundScreen
from textual.screen import ModalScreen as _ModalScreen
from textual.screen import Screen
from textual.widgets import Input
from textual.worker import WorkerError

from dtype_tui.process.textual_private import choose_in, has_windows, is_ending

Result = TypeVar("Result")


def is_from_closed_window(error: Exception, app: App[Any]) -> bool:
    """Return whether an error can be ignored: the app is ending, or a widget was not found in a window that is closed or not yet
    built. The latter happens when keys open and close windows in quick succession.
    """
    if is_ending(app) and isinstance(error, (NoMatches, ScreenStackError)):
        return True
    if isinstance(error, ScreenStackError):
        return not has_windows(app)  # the app itself is ending
    if not isinstance(error, NoMatches):
        return False
    nodes = nodes_in_traceback(error)
    if not nodes:
        return False
    above = [node for node in nodes[-1].ancestors_with_self if isinstance(node, Screen)]
    return not any(screen in app.screen_stack and screen.is_mounted and screen.children for screen in above)


def nodes_in_traceback(error: Exception) -> list[DOMNode]:
    """Return the widgets whose methods appear in an error's traceback, the outermost first. If the error was raised in a task of
    the app, Textual's active message pump does not tell which window is affected.
    """
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [node for node in owners if isinstance(node, DOMNode) and not isinstance(node, App)]


def _close_once(
    screen: Screen[Result], dismiss: Callable[[Result | None], AwaitComplete], result: Result | None
) -> AwaitComplete:
    """Close a screen by Textual's method `dismiss` if it is the topmost; otherwise do nothing."""
    if screen.is_active:
        return dismiss(result)
    return AwaitComplete()


def _draw_over(window: Screen[Any]) -> RenderableType | None:
    """Return what to draw behind a window: the screen below it, tinted by the window's background, or None if the window is not
    open.

    Textual finds the screen below in a list that changes while other windows are drawn. If windows open and close meanwhile, two
    could each be drawn over the other, in an endless recursion.
    """
    stack = window.app.screen_stack
    place = stack.index(window) if window in stack else 0
    return BackgroundScreen(stack[place - 1], window.styles.background) if place else None


SCROLLING = (
    Binding("up", "scroll(-1)", "Scroll up", priority=True),
    Binding("down", "scroll(1)", "Scroll down", priority=True),
    Binding("pageup", "scroll(-8)", "A page up", priority=True, show=False),
    Binding("pagedown", "scroll(8)", "A page down", priority=True, show=False),
)
"""Keys that scroll a window while an input field has the focus."""


class ModalScreen(_ModalScreen[Result]):
    """A window over the main screen. Closing it a second time has no effect."""

    def render(self) -> RenderableType:
        return _draw_over(self) or super().render()

    def dismiss(self, result: Result | None = None) -> AwaitComplete:
        return _close_once(self, super().dismiss, result)

    def show_figures(self) -> None:
        """Show the engine's latest results. Called whenever the main screen redraws for events."""

    def action_leave(self) -> None:
        self.dismiss()

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


class CommandPalette(_CommandPalette):
    """Textual's command palette. Closing it a second time has no effect."""

    def render(self) -> RenderableType:
        return _draw_over(self) or super().render()

    def dismiss(self, result: None = None) -> AwaitComplete:
        return _close_once(self, super().dismiss, result)

    @on(Input.Submitted)
    async def choose_once_searched(self, event: Input.Submitted) -> None:
        """Make Enter wait until the whole text has been searched for. Textual would choose a result for an earlier text."""
        event.prevent_default()
        event.stop()
        for search in [worker for worker in self.workers if worker.node is self]:
            with contextlib.suppress(WorkerError):  # an earlier search that was cancelled
                await search.wait()
        choose_in(self, event)

    def _action_command_list(self, action: str) -> None:
        # Textual's list may be empty when it handles a key, because a new search has begun.
        with contextlib.suppress(KeyError, IndexError, NoMatches):
            super()._action_command_list(action)
