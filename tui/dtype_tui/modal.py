"""Windows over the main screen that close once.

Textual's own `dismiss` takes the topmost screen off, whichever that is: two clicks beside the palette, or two keys in one burst,
that both close a window reach it before it is gone, and the second would take off the screen below, in the end the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from textual.await_complete import AwaitComplete
from textual.command import CommandPalette as _CommandPalette
from textual.screen import ModalScreen as _ModalScreen
from textual.screen import Screen

Result = TypeVar("Result")


def _close_once(
    screen: Screen[Result], dismiss: Callable[[Result | None], AwaitComplete], result: Result | None
) -> AwaitComplete:
    """Dismiss a screen that is still on top; one that is gone already, or lies under another, stays as it is."""
    if screen.is_active:
        return dismiss(result)
    return AwaitComplete()


class ModalScreen(_ModalScreen[Result]):
    """A window over the main screen. To close it twice is to close it once."""

    def dismiss(self, result: Result | None = None) -> AwaitComplete:
        """Close it with a result, unless it is closed."""
        return _close_once(self, super().dismiss, result)


class CommandPalette(_CommandPalette):
    """Textual's palette. To close it twice is to close it once."""

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close it, unless it is closed."""
        return _close_once(self, super().dismiss, result)
