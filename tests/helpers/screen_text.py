"""What stands on the screen of an app under test, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.pilot import Pilot


def lines(app: App[Any]) -> list[str]:
    """What stands on the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips][: app.size.height]


def screen(app: App[Any]) -> str:
    return "\n".join(lines(app))


def notices(app: App[Any]) -> list[str]:
    return [notification.message for notification in app._notifications]


async def until(pilot: Pilot[Any], condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for what a thread works out, and then for all that was posted with it: a notice is on its way to the app when its
    sender goes on. Fails with the screen.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, screen(pilot.app)
        await pilot.pause(0.05)
    await pilot.pause(0)
