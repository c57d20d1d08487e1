"""The helper that the app's tests wait with."""

from __future__ import annotations

import asyncio

from tests.helpers.screen_text import notices, until
from textual.app import App
from textual.message import Message


class Slow(Message):
    """Takes the app a while, as a window does that is drawn anew."""


class Busy(App[None]):
    """Says something while it has other things to do first."""

    done = False

    async def on_slow(self) -> None:
        self.done = True
        await asyncio.sleep(0.3)

    def on_mount(self) -> None:
        self.set_timer(0.1, self._say)

    def _say(self) -> None:
        self.post_message(Slow())
        self.notify("said")


async def test_waiting_for_a_condition_handles_messages_posted_before() -> None:
    app = Busy()
    async with app.run_test() as pilot:
        await until(pilot, lambda: app.done)
        assert notices(app) == ["said"]
