"""What stands on the screen of an app under test, whether it fits, and waiting for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.cells import cell_len
from rich.text import Text
from textual.app import App
from textual.containers import ScrollableContainer, VerticalScroll
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Static

from dtype_tui.app import DtypeApp
from dtype_tui.main_screen import MainScreen
from dtype_tui.widgets.line import Line


def lines(app: App[Any]) -> list[str]:
    """What stands on the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips][: app.size.height]


def screen(app: App[Any]) -> str:
    return "\n".join(lines(app))


def missing(app: App[Any], *words: str) -> list[str]:
    """Which of these words are not on the screen."""
    shown = screen(app)
    return [each for each in words if each not in shown]


def notices(app: App[Any]) -> list[str]:
    return [notification.message for notification in app._notifications]


def overflowing(app: App[Any]) -> Iterator[str]:
    """What does not fit: widgets that reach beyond the screen or their box, lines and titles that are cut."""
    for widget in app.screen.walk_children(Widget):
        if not widget.display or not widget.region:
            continue
        name = f"{type(widget).__name__} #{widget.id}"
        scrolls = any(isinstance(above, ScrollableContainer) for above in widget.ancestors)
        if not scrolls and not app.screen.region.contains_region(widget.region):
            yield f"{name} reaches beyond the screen: {widget.region}"
        if isinstance(widget, VerticalScroll) and widget.max_scroll_x and not app.screen.has_class("map"):
            yield f"{name} is {widget.max_scroll_x} cells too wide"
        for words in (widget.border_title, widget.border_subtitle):
            if words and cell_len(str(words)) > widget.region.width - 4:
                yield f"{name}: {words!r} is cut"
        is_line = isinstance(widget, Static) and widget.region.height == 1
        words = widget.content if is_line else widget.text if isinstance(widget, Line) else None
        if widget.id == "command-hint":
            continue  # completions, as many as there is room for
        if isinstance(words, Text) and words.cell_len > widget.region.width:
            yield f"{name}: {words.plain!r} is cut"


def is_measured(app: DtypeApp) -> bool:
    """Whether the current recipe is measured, and the engine idle."""
    return app.controller.experiment.results.report is not None and not app.controller.activity.busy


async def drawn(pilot: Pilot[Any]) -> None:
    """Wait until the screen shows all that the app has heard from its engine."""
    main = getattr(pilot.app, "main", None)
    while isinstance(main, MainScreen) and main.draw_is_due and main.is_running:
        await asyncio.sleep(0.01)
    await pilot.pause(0)


async def until(pilot: Pilot[Any], condition: Callable[[], object], seconds: float = 240) -> None:
    """Wait for what a thread works out, then for all that was posted with it (a notice is on its way to the app when its sender
    goes on), and then until it is on the screen. What a later event brings is not there yet: wait for that. Fails with the screen.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, screen(pilot.app)
        await asyncio.sleep(0.05)  # what `pilot.pause` does besides is a message to each widget
    await pilot.pause(0)
    await drawn(pilot)
