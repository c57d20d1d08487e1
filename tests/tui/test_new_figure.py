"""A figure that was only added to the table `FIGURES` is shown in the Drift pane, the details, the comparison and the history."""

from __future__ import annotations

import dataclasses
import re

import pytest
from tests.helpers.recording_engine import launched, report, say
from tests.helpers.scenes import ready
from tests.helpers.screen_text import screen
from tests.helpers.toy_figure import TOY

from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.figures import FIGURES
from dtype_engine.service import events
from dtype_tui.state.full_rows import drift_rows


@pytest.mark.slow
@pytest.mark.parametrize("kl", [1e-3, None])
async def test_new_figure_is_shown_in_drift_pane_details_comparison_and_history(
    monkeypatch: pytest.MonkeyPatch, kl: float | None
) -> None:
    monkeypatch.setitem(FIGURES, TOY.name, TOY)
    async with launched(size=(200, 50)) as (app, pilot):
        await ready(app, pilot)
        for place, rule in enumerate(("*=bfloat16", "*=float16")):
            recipe = Recipe((Rule.parse(rule),))
            app.controller.apply_recipe(recipe)
            told = report(recipe, mean_abs=1e-3 * (place + 1))
            output = dataclasses.replace(told.output, kl_mean=kl)
            await say(app, pilot, events.Measured(recipe, dataclasses.replace(told, output=output)), events.Idle())
        assert re.search(r"mean/max +0\.00400", screen(app))
        assert ("mean/max", "0.00400") in drift_rows(app.controller.experiment)
        await pilot.press("H")
        await pilot.pause()
        assert re.search(r" mean/max .* rules ", screen(app))
        assert {"0.00200", "0.00400"} <= set(screen(app).split())
        await pilot.press("c", "j", "c")
        await pilot.pause()
        assert re.search(r"mean/max +0\.00400 +0\.00200", screen(app)), screen(app)
