"""Waiting for a screen under test asks only where something is going on.

Textual's pilot sends a message to each widget after every key and in every pause, and waits until all have come back: two
milliseconds of the processor's time, mostly for widgets that have had nothing to do. Where every widget waits for its next message,
all that came before has been handled.
"""

from __future__ import annotations

import asyncio
from typing import Any

from textual.app import App
from textual.pilot import Pilot

_wait = Pilot._wait_for_screen
_TURNS = 5
"""Of the event loop, for what a thread or a task is about to send."""


def leave_alone() -> None:
    """Send nothing to screens that are quiet, from now on, in this process."""
    Pilot._wait_for_screen = _wait_if_busy  # type: ignore[method-assign]


async def _wait_if_busy(pilot: Pilot[Any], timeout: float = 30.0) -> bool:
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    return _is_quiet(pilot.app) or await _wait(pilot, timeout)


def _is_quiet(app: App[Any]) -> bool:
    """Whether the app and each widget on its screen wait for a message, and none is there."""
    if not app._screen_stack:
        return False
    pumps = app, *app.screen.walk_children(with_self=True)
    return all(_waits(pump._message_queue.ready_event) for pump in pumps)


def _waits(arrival: asyncio.Event) -> bool:
    return bool(arrival._waiters) and not arrival.is_set()  # type: ignore[attr-defined]
