"""Uses private names of Textual. No other file of the app does, except to override methods. Tested with Textual 8.2."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from textual._context import active_message_pump
from textual._styles_cache import StylesCache
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.command import CommandPalette
from textual.drivers import linux_driver
from textual.events import Key, Paste
from textual.filter import LineFilter
from textual.notifications import Notification
from textual.widgets import Input

__all__ = ["XTermParser", "active_message_pump"]


def use_parser(parser: type[XTermParser]) -> None:
    """Make Textual's terminal driver parse keys with `parser`. To be called before the driver starts."""
    linux_driver.XTermParser = parser  # type: ignore[attr-defined]


def expects_more(parser: XTermParser) -> bool:
    """Return whether a parser waits for more characters of a key."""
    return parser._timeout_time is not None


def add_filters(app: App[Any], *filters: LineFilter) -> None:
    """Make an app pass every line that it draws through these filters, after the filters that it has already."""
    app._filters += filters


def messages_of(app: App[Any]) -> list[Notification]:
    return list(app._notifications)


def forget_message(app: App[Any], message: Notification) -> None:
    app._unnotify(message, refresh=False)


def forget_drawings() -> None:
    """Clear Textual's cache of up to 1,024 drawn widgets, also of closed windows: tens of MiB after some hundred windows."""
    StylesCache.get_inner_outer.cache_clear()


async def run_bound(app: App[Any], key: Key, priority: bool = False) -> bool:
    """Run the action to which a key is bound. Returns False if no binding handled it. Only bindings with this `priority` count."""
    return await app._check_bindings(key.key, priority=priority)


async def type_into(field: Input, key: Key) -> None:
    await field._on_key(key)


def paste_into(field: Input, paste: Paste) -> None:
    field._on_paste(paste)


def choose_in(palette: CommandPalette, event: Input.Submitted) -> None:
    """Run the command that is selected in a palette. If none is selected, select the first, and run it if it is the only one."""
    palette._select_or_command(event)


def is_ending(app: App[Any]) -> bool:
    return app._exit


def has_windows(app: App[Any]) -> bool:
    return any(app._screen_stacks.values())


def error_of(app: App[Any]) -> Exception | None:
    return app._exception


def end_by_error(app: App[Any], last_words: RenderableType) -> None:
    """Close an app because of an error, and print `last_words` afterwards."""
    app._exit_renderables.append(last_words)
    app._close_messages_no_wait()
