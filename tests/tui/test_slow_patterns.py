"""Patterns that take for ever, typed into the app: the keys go on, and what was on the screen stays."""

from __future__ import annotations

import pytest
from tests.helpers.recording_engine import make_app
from tests.helpers.screen_text import screen, until
from textual.widgets import Input

from dtype_engine.recipe import Rule
from dtype_tui.widgets.panes.side import SidePanes
from dtype_tui.widgets.prompts import CastPrompt

SLOW = "re:" + "(.*?)*?" * 6 + "[YZ]"
"""A pattern for which `re` takes longer than anybody waits on one name of the demo."""


@pytest.mark.slow
async def test_slow_pattern_typed_in_the_cast_prompt_is_reported() -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("2")
        before = app.controller.experiment.recipe
        await pilot.press("c")
        app.query_one("#cast-input", Input).value = f"{SLOW}=bf16"
        await pilot.pause(0.3)
        await until(pilot, lambda: "takes too long to match" in screen(app))
        await pilot.press("escape")
        assert not app.query_one(CastPrompt).has_class("open")
        assert app.controller.experiment.recipe == before
        await pilot.press("u")
        assert not app.controller.experiment.recipe.rules


@pytest.mark.slow
async def test_rule_with_a_slow_pattern_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("2")
        before = app.controller.experiment.recipe
        monkeypatch.setattr("dtype_engine.recipe.plan.MATCHING_S", 0.2)  # all of which a core is busy
        app.controller.add_rule(Rule.make(SLOW, "bfloat16"))
        await pilot.pause()
        assert app.controller.experiment.recipe == before
        assert "takes too long to match" in str([note.message for note in app._notifications])
        assert app.query_one(SidePanes)
