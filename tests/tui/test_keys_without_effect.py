"""A key that can do nothing now says why."""

from __future__ import annotations

import pytest
from tests.helpers.observations import rules, top
from tests.helpers.recording_engine import app_of, engine, launched, report, running, say
from tests.helpers.scenes import ready
from tests.helpers.screen_text import notices

from dtype_engine.service import events
from dtype_tui.state.launch import Launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("key", ["p", "e", "c", "enter"])
async def test_key_that_needs_the_tensors_says_that_they_are_unknown(key: str) -> None:
    app = app_of(Launch("net", None))
    async with running(app) as pilot:
        await pilot.press(key)
        await pilot.pause()
        assert (top(app), app.focused) == ("MainScreen", app.main.tree_view)
        assert notices(app) == ["the model's tensors are not known yet"]
        await say(app, pilot, events.OpenFailed("net is not there"), events.Idle())
        await pilot.press(key)
        assert notices(app)[-1] == "net is not there"


@pytest.mark.parametrize("key", ["enter", "2", "K", "J", "space", "x"])
async def test_key_of_the_rules_says_that_there_are_none(key: str) -> None:
    async with launched() as (app, pilot):
        await ready(app, pilot)
        await pilot.press("r", key)
        assert rules(app) == []
        assert notices(app) == ["there are no rules yet: c adds one"]


async def test_rule_that_has_the_dtype_of_the_key_says_so() -> None:
    async with launched() as (app, pilot):
        await ready(app, pilot)
        await pilot.press("2", "r", "2")
        assert notices(app)[-1] == "rule 1 is *=bfloat16 already"


async def test_enter_on_the_current_recipe_of_the_history_says_so() -> None:
    async with launched() as (app, pilot):
        await ready(app, pilot)
        await pilot.press("2")
        recipe = app.controller.experiment.recipe
        await say(app, pilot, events.Measured(recipe, report(recipe)), events.Idle())
        await pilot.press("H", "enter")
        await pilot.pause()
        assert top(app) == "MainScreen"
        assert notices(app)[-1] == "this recipe is already applied"
        assert engine(app).recipes == [recipe]


async def test_key_to_the_next_cast_node_says_that_there_is_none() -> None:
    async with launched() as (app, pilot):
        await ready(app, pilot)
        app.main.tree_view.action_next_cast(1)
        await pilot.pause()
        assert notices(app)[-1] == "no node is cast as a whole"
