"""What the presets' window says of each preset."""

from __future__ import annotations

import math
import re

import pytest
from tests.helpers.recording_engine import report, say
from tests.helpers.screen_text import screen, until
from tests.tui.screens.test_scan import opened, scan_report
from textual.containers import VerticalScroll

from dtype_engine.core.units import scientific
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.recipe.presets import PRESETS
from dtype_engine.service import events
from dtype_tui.screens.presets import PresetsScreen


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_presets_show_the_predicted_drift_after_a_scan_and_then_the_measured_drift(size: tuple[int, int]) -> None:
    found = scan_report()
    whole = math.fsum(score.score for score in found.weights if score.dtype == "bfloat16")
    bf16 = Recipe((Rule("*", "bfloat16"),))
    async with opened(size=size) as (app, pilot):

        async def shown(end: bool = False) -> str:
            await pilot.press("p")
            page = app.screen
            assert isinstance(page, PresetsScreen)
            await until(pilot, lambda: len(page.effects) == len(PRESETS))
            if end:
                page.query_one(VerticalScroll).scroll_end(animate=False)
                await pilot.pause()
            text = screen(app)
            await pilot.press("escape")
            return text

        assert "predicted" not in await shown()
        await say(app, pilot, events.ScanUpdated(found, True))
        text = await shown()
        assert re.search(rf"all-bf16 .* {scientific(whole, 1)} predicted", text)
        assert re.search(r"Predicted: the drift by the scan, in nats per\W+token\.", await shown(end=True))
        app.controller.apply_recipe(bf16)
        await say(app, pilot, events.Measured(bf16, report(bf16)))
        text = await shown()
        assert re.search(r"all-bf16 .* 2.5e-4 small", text)
        assert f"{scientific(whole, 1)} predicted" not in text
