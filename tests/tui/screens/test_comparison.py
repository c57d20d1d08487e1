"""Two recipes side by side, and a recipe beside the one in force."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from tests.helpers.recording_engine import launched, make_app, report, running, say
from tests.helpers.scenes import ready
from tests.helpers.screen_text import lines, missing, screen
from textual.pilot import Pilot

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.results.losses import ValueLoss
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.state.measurement_log import ModuleLog, measured
from dtype_tui.widgets.module_tree import ModuleTree

pytestmark = pytest.mark.slow

MLP = "model.layers.4.mlp"
LAYER = "model.layers.4"


async def measure(app: DtypeApp, pilot: Pilot[None], rule: str, sqnr_db: float, modules: Sequence[float]) -> None:
    recipe = Recipe((Rule.parse(rule),))
    app.controller.experiment.push(recipe)
    found = tuple(ModuleDrift(name, db, 0.1, 0) for name, db in zip((MLP, LAYER), modules, strict=True))
    told = report(recipe, 1e-3, found)
    output = dataclasses.replace(told.output, sqnr_db=sqnr_db)
    await say(app, pilot, events.Measured(recipe, dataclasses.replace(told, output=output)), events.Idle())


async def two_measured(app: DtypeApp, pilot: Pilot[None]) -> None:
    await ready(app, pilot)
    await measure(app, pilot, "*=bfloat16", 40.0, (45.0, 50.0))
    await measure(app, pilot, f"{MLP}=float8_e4m3fn", 31.5, (30.0, 50.0))


async def test_pinned_recipe_is_shown_beside_the_current_one_until_unpinned() -> None:
    async with launched() as (app, pilot):
        await two_measured(app, pilot)
        app.query_one(ModuleTree).go_to(MLP)
        await pilot.press("H", "j", "P", "escape")
        await pilot.pause()
        (row,) = (line for line in lines(app) if " mlp" in line and "fp8" in line)
        assert row.split("│")[0].split()[-2:] == ["30.0", "-15.0"]
        (root,) = (line for line in lines(app) if line.strip(" ▌").startswith("▾ demo"))
        assert root.split("│")[0].split()[-2:] == ["31.5", "-8.5"]
        assert not missing(app, "P KL 2.50e-4  40.00 dB  small", "P 1.35 MiB")
        await pilot.press("H", "j", "P", "escape")
        await pilot.pause()
        assert "P 1.35 MiB" not in screen(app)
        assert "vs #" not in lines(app)[1]


async def test_two_recipes_are_compared_by_rules_tensors_and_modules() -> None:
    async with launched(size=(120, 50)) as (app, pilot):
        await two_measured(app, pilot)
        await pilot.press("H", "c", "j", "c")
        await pilot.pause()
        text = " ".join(screen(app).split())
        assert f"{MLP}=float8_e4m3fn only in 2" in text
        assert "*=bfloat16 only in 1" in text
        assert "56 tensors of another dtype" in text
        for _ in range(60):
            await pilot.press("j")
        await pilot.pause()
        text = " ".join(screen(app).split())
        assert f"{MLP} 30.00 dB 45.00 dB -15.00 dB" in text
        assert f" {LAYER} 50.00 dB" not in text, "it drifts alike"


async def test_comparison_says_if_lost_values_were_not_counted() -> None:
    app = make_app()
    lost = ValueLoss("lm_head.weight", "float16", overflowed=7, vanished=0, elements=100)
    async with running(app, (120, 50)) as pilot:
        await ready(app, pilot)
        for rule, losses in (("*=float16", (lost,)), ("*=bfloat16", None), ("*=float8_e4m3fn", ())):
            recipe = Recipe((Rule.parse(rule),))
            app.controller.experiment.push(recipe)
            told = dataclasses.replace(report(recipe), lost=losses)
            await say(app, pilot, events.Measured(recipe, told), events.Idle())
        for keys, expected in ((("c", "j", "c"), "none not counted"), (("c", "j", "j", "c"), "none ⚠ 7 inf")):
            await pilot.press("H", *keys)
            await pilot.pause()
            assert f"values lost {expected}" in " ".join(screen(app).split())
            await pilot.press("escape", "escape")


async def test_comparison_says_if_module_figures_were_not_kept() -> None:
    async with launched(size=(120, 50)) as (app, pilot):
        await two_measured(app, pilot)
        app.controller.experiment.module_log = ModuleLog()
        await pilot.press("H", "c", "j", "c", "end")
        await pilot.pause()
        assert "not kept for both" in screen(app)


def test_oldest_module_results_are_dropped() -> None:
    log, kept = ModuleLog(), []
    log.MOST = 5  # type: ignore[misc]
    for number in range(4):
        recipe = Recipe((Rule("*", "bfloat16"),) * (number + 1))
        kept.append(measured(report(recipe), recipe, RunSettings(), 100))
        log.keep(kept[-1], [ModuleDrift(name, 1.0, 1.0, 0) for name in ("a", "b")])
    assert [log.of(entry) is not None for entry in kept] == [False, False, True, True]
