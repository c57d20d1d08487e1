"""The last line: the keys that the user probably needs next, by what has been done and what is under way."""

from __future__ import annotations

import pytest
from tests.helpers.recording_engine import launched, model_ready, report, say
from tests.helpers.scenes import mixed, ready, scanned
from tests.helpers.screen_text import lines, screen

from dtype_engine.service import events

SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 36)])


@SIZES
async def test_esc_comes_first_while_the_engine_works(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await ready(app, pilot)
        assert "Esc" not in lines(app)[-1]
        await pilot.press("2")
        recipe = app.controller.experiment.recipe
        await say(app, pilot, events.Measured(recipe, report(recipe)), events.Idle())
        idle = lines(app)[-1]
        assert idle.startswith(" 1-8 dtype  c cast  u undo  ")
        await say(app, pilot, events.MeasuringProgress(recipe, "candidate", 1, 10))
        assert lines(app)[-1] == idle.replace("1-8 dtype", "Esc stop "), "the other keys stay where they are"
        assert screen(app).count("Esc") == 1


async def test_esc_of_a_filter_is_not_said_to_stop() -> None:
    async with launched(size=(120, 36)) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("slash", *"up_proj", "enter")
        recipe = app.controller.experiment.recipe
        await say(app, pilot, events.MeasuringProgress(recipe, "candidate", 1, 10))
        assert "Esc clear the filter" in lines(app)[-1]
        assert "Esc stop" not in screen(app)


@SIZES
async def test_after_a_scan_comes_the_front_and_after_a_measured_recipe_saving(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await ready(app, pilot)
        await say(app, pilot, scanned(app), events.Idle())
        assert lines(app)[-1].startswith(" o optimise  1-8 dtype  ")
        await mixed(app, pilot)
        assert lines(app)[-1].startswith(" e save  o optimise  1-8 dtype  ")


async def test_viewers_are_not_shown_the_key_that_saves() -> None:
    async with launched(size=(180, 50), read_only=True) as (app, pilot):
        await say(app, pilot, model_ready(app), events.Idle())
        assert "o optimise" in lines(app)[-1]
        assert "save" not in lines(app)[-1]
