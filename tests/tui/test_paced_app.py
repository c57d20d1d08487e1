"""What an app leaves on a terminal whose line turns out to be fast in the middle of a page."""

from __future__ import annotations

import time

import pyte
from tests.helpers.terminal import clean
from textual.app import ComposeResult
from textual.widgets import Label

from dtype_tui.paced_app import PacedApp
from dtype_tui.process.line_pace import MOST_UNANSWERED, LinePace
from dtype_tui.process.paced_driver import PacedDriver

WIDTH, HEIGHT = 60, 12


class _Lines(PacedApp[None]):
    """A page of ten lines."""

    def compose(self) -> ComposeResult:
        for number in range(10):
            yield Label(f"line {number} as it was", id=f"line-{number}")


class _Driver(PacedDriver):
    """Writes to a screen, and has no terminal to ask: the test answers."""

    def __init__(self) -> None:
        self.pace = LinePace()
        self.screen = pyte.Screen(WIDTH, HEIGHT)
        self._stream = pyte.ByteStream(self.screen)

    @property
    def is_headless(self) -> bool:
        return False

    def write(self, data: str) -> None:
        self.written += len(data)
        self._stream.feed(clean(data.encode()))

    def flush(self) -> None:
        pass

    def ask(self, sent: int | None = None) -> None:
        self.pace.asked(time.monotonic(), self.written if sent is None else sent)


async def test_what_was_not_drawn_yet_is_drawn_then() -> None:
    app = _Lines()
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        usual, driver = app._driver, _Driver()
        app._driver = driver
        try:
            driver.pace.judge()
            driver.pace.slow, driver.pace.rate = True, 120.0
            for number in range(10):
                app.query_one(f"#line-{number}", Label).update(f"line {number} as it is now")
            await pilot.pause()
            assert 0 < _drawn(driver) < 10, "it is in the middle of a page"
            # As the thread does that reads the terminal's answers; the app has not heard of it.
            for _ in range(MOST_UNANSWERED):
                driver.pace.give_up()
            app.query_one("#line-0", Label).update("line 0 as it is now!")
            await pilot.pause(0.2)
            assert _drawn(driver) == 10, "\n".join(driver.screen.display)
        finally:
            app._driver = usual


def _drawn(driver: _Driver) -> int:
    return sum("as it is now" in line for line in driver.screen.display)
