"""A window that is closed twice is closed once, whichever it is."""

from __future__ import annotations

import pytest
from noting import make_app, report, running, say
from rows import until
from textual.events import Key
from textual.screen import ModalScreen

from dtype_engine import events


@pytest.mark.parametrize("key", ["question_mark", "enter", "comma", "p", "e", "s", "H", "d", "i", "ctrl+p"])
async def test_closed_twice_in_one_burst_and_the_main_screen_stays(key: str) -> None:
    app = make_app()
    recipe = app.experiment.recipe
    async with running(app) as pilot:
        ready = events.ModelReady(app.experiment.tree, "LlamaForCausalLM", "cpu", 1.0, "prompts", ())
        await say(app, pilot, ready, events.Measured(recipe, report(recipe)))
        await pilot.press(key)
        await pilot.pause()
        window = app.screen
        assert isinstance(window, ModalScreen)
        for _ in range(3):  # before any of them is looked at, as they come from a terminal in one write
            app.post_message(Key("escape", None))
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert app.screen is app.screen_stack[0]
        assert len(app.screen_stack) == 1
        window.dismiss(None)
        await pilot.press("2")
        assert len(app.experiment.recipe) == 1
