"""The window with all messages that the app has shown."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.text import Text
from textual.notifications import Notification

from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.overlay import Overlay


def messages_screen(said: Iterable[Notification]) -> Overlay:
    """Return a window with every message and its time of day, the newest first."""
    grid = PlainTable.labelled()
    for each in reversed(list(said)):
        style = "" if each.severity == "information" else "bold"
        grid.add_row(time.strftime("%H:%M:%S", time.localtime(each.raised_at)), Text(each.message, style=style))
    if not grid.row_count:
        grid.add_row("", "No messages yet.")
    return Overlay("Messages", grid)
