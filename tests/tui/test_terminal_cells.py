"""What stands on the terminal is what the app draws, although only changed cells are written."""

from __future__ import annotations

import pyte
import pytest
from tests.helpers.recording_engine import make_app, report, say
from tests.helpers.scenes import MIXED, mixed, modules
from tests.helpers.screen_text import lines
from textual.drivers.headless_driver import HeadlessDriver

from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.process.short_frames import ShownCells

pytestmark = pytest.mark.slow
KEYS = (
    "j", "k", "l", "pagedown", "end", "home", "question_mark", "j", "escape", "enter", "escape", "F", "H", "j", "P", "escape",
    "2", "u", "c", "m", "l", "p", "escape", "slash", "u", "p", "escape", "tab", "plus", "escape", "r", "escape", "semicolon",
    "escape", "d", "escape", "e", "escape", "comma", "escape",
)  # fmt: skip


async def test_cells_of_the_terminal_equal_those_that_the_app_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    cells, terminal = ShownCells(), pyte.Screen(120, 36)
    stream = pyte.Stream(terminal)
    monkeypatch.setattr(HeadlessDriver, "write", lambda driver, data: stream.feed(cells.shortened(data)))
    app = make_app()

    def same(act: object) -> None:
        drawn = lines(app)
        assert [row.rstrip() for row in terminal.display[: len(drawn)]] == [row.rstrip() for row in drawn], act

    async with app.run_test(size=(120, 36)) as pilot:
        monkeypatch.setattr(DtypeApp, "is_headless", False)
        await mixed(app, pilot)
        # A wider terminal has all that the first one had; what it adds is that the screen grows.
        for size, keys in (((120, 36), KEYS), ((80, 24), KEYS), ((130, 40), KEYS[:9])):
            terminal.resize(size[1], size[0])
            await pilot.resize_terminal(*size)
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
                app.clear_notifications()
                await pilot.pause()
                same((size, key))
            measured = events.Measured(app.controller.experiment.recipe, report(MIXED, 1e-2, modules()))
            await say(app, pilot, measured, events.Idle())
            await pilot.pause(0.15)
            same((size, "a measurement"))
        monkeypatch.undo()
