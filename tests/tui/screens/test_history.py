"""The table of measured recipes: what is read of it at every width."""

from __future__ import annotations

import dataclasses

import pytest
from rich.text import Text
from tests.helpers.recording_engine import launched, report, say
from tests.helpers.scenes import MIXED, measured_in_part, ready
from tests.helpers.screen_text import lines, missing, screen
from textual.pilot import Pilot
from textual.widgets import DataTable

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.metrics import MetricChange
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.screens.history import fitting

FP8 = Recipe((Rule("*.mlp", "float8_e4m3fn"),))


async def three_measured(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Send three measurements: one unfinished, one below the floor (the table's longest word), and the one now in force."""
    await measured_in_part(app, pilot)
    for recipe, kl in ((Recipe((Rule("*", "bfloat16"),)), 1e-14), (FP8, 2e-4)):
        app.controller.apply_recipe(recipe)
        told = report(recipe)
        output = dataclasses.replace(told.output, kl_mean=kl, values={"perplexity_candidate": 123.4567})
        await say(app, pilot, events.Measured(recipe, dataclasses.replace(told, output=output)), events.Idle())
    app.clear_notifications()
    await pilot.press("H")
    await pilot.pause()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 50)])
async def test_history_shows_rules_drift_time_and_sequences_at_every_width(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await three_measured(app, pilot)
        at = next(place for place, line in enumerate(lines(app)) if "time" in line and "rules" in line)
        rows = lines(app)[at + 1 : at + 4]
        now, plain, part = (row.partition("│")[2] for row in rows)
        assert "small" in now
        assert "200.0 ms" in now
        assert "now: *.mlp=float8_e4m3fn" in now
        assert "invisible" in plain
        assert "200.0 ms  *=bfloat16" in plain
        assert "2 of 6" in part
        assert "*=bfloat16, *norm*" in part
        assert ("123.4567" in now) == (size[0] > 80), "the perplexity goes first"
        assert app.screen.query_one(DataTable).max_scroll_x == 0, screen(app)
        await pilot.press("j", "j")
        await pilot.pause()
        assert "over 2 of 6 sequences" in screen(app)


@pytest.mark.slow
async def test_columns_of_the_history_that_do_not_fit_the_terminal_are_left_out() -> None:
    async with launched(size=(120, 36)) as (app, pilot):
        await ready(app, pilot)
        app.controller.apply_recipe(MIXED)
        await say(app, pilot, events.Measured(MIXED, report(MIXED)), events.Idle())
        await pilot.press("H")
        await pilot.pause()
        assert "same top-1" in screen(app)
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        await pilot.pause()
        assert "same top-1" not in screen(app)
        assert "rules" in screen(app)


def test_narrow_history_drops_empty_columns_first() -> None:
    names = ("", "bytes", "drift", "SQNR dB", "KL nats", "same top-1", "perplexity", "time", "rules")
    row = {name: Text("" if name == "KL nats" else "12345678") for name in names}
    everything = fitting([row], 200)
    assert set(everything) == set(names)
    assert sum(everything.values()) + 2 * len(names) == 200
    narrower = fitting([row], 8 * 10 + 10 - 1)
    assert set(narrower) == set(names) - {"KL nats"}


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_user_metrics_are_shown_in_drift_pane_history_and_comparison(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        for recipe, accuracy in ((Recipe((Rule("*", "bfloat16"),)), 0.9), (FP8, 0.75)):
            app.controller.apply_recipe(recipe)
            metric = MetricChange("accuracy", 0.92, accuracy, 0.0042, 400, 31)
            told = dataclasses.replace(report(recipe), metrics=(metric,))
            await say(app, pilot, events.Measured(recipe, told, RunSettings()), events.Idle())
        app.clear_notifications()
        assert not missing(app, "accuracy 0.92 → 0.75", "-0.17 ± 0.004")
        await pilot.press("H")
        await pilot.pause()
        at = next(place for place, line in enumerate(lines(app)) if "accuracy" in line and "rules" in line)
        assert ["0.75" in lines(app)[at + 1], "0.9 " in lines(app)[at + 2]] == [True, True], screen(app)
        assert "up: KL, nats; y plots another figure" in screen(app)
        await pilot.press("y")
        await pilot.pause()
        assert "up: accuracy" in screen(app)
        await pilot.press("y", "c", "j", "c")
        await pilot.pause()
        assert "0.92 → 0.9, -0.02 ± 0.0042" in screen(app)
