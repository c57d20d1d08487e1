"""Causes, remedy, history, limits and floor in the app: with events fed by hand, and once with the real engine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tests.helpers.observations import chosen, cursor, marked_line
from tests.helpers.recording_engine import engine, launched, make_app, report, running, say
from tests.helpers.screen_text import missing, notices, screen, until
from tests.helpers.slow_net import app_on
from textual.pilot import Pilot

from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.reports.text_drift import causes_headline
from dtype_engine.results.attribution import (
    AttributionReport,
    Contribution,
    NoiseFloor,
    NonFiniteDiagnosis,
    PartialAttribution,
)
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.results.thresholds import Limit
from dtype_engine.service import events, jobs
from dtype_tui.app import DtypeApp
from dtype_tui.screens.causes import CausesScreen
from dtype_tui.screens.history import MeasurementsScreen
from dtype_tui.screens.overlay import Overlay
from dtype_tui.state.node_rules import reference_rule
from dtype_tui.widgets.module_tree import ModuleTree

pytestmark = pytest.mark.slow

WIDE, SMALL = (120, 36), (80, 24)
BF16 = Recipe((Rule("*", "bfloat16"),))
DOWN = "model.layers.1.mlp.down_proj"
LIMITS = (
    Limit("max_kl", "kl_mean", 1e-4), Limit("min_sqnr", "sqnr_db", 30.0), Limit("min_top1", "top1_agreement", 0.99),
)  # fmt: skip


def modules() -> tuple[ModuleDrift, ...]:
    return tuple(
        ModuleDrift(f"model.layers.{layer}.mlp.{part}", 60.0 - 5 * layer, 1e-3, 0)
        for layer in range(6)
        for part in ("gate_proj", "up_proj", "down_proj")
    )


async def measured(app: DtypeApp, pilot: Pilot[None], recipe: Recipe = BF16, mean_abs: float = 1e-3) -> None:
    """Put a recipe in force, and send its measurement."""
    app.controller.apply_recipe(recipe)
    await say(app, pilot, events.Measured(recipe, report(recipe, mean_abs, modules())), events.Idle())


CAUSES = AttributionReport(
    "demo", ("*=bfloat16",), "nats per token", 2e-4, 1.5e-4, 256, 60, 1.0,
    (Contribution(DOWN, 1, 1.24e-4, 0.62, 41.0), Contribution("model.layers.2.mlp.up_proj", 1, 2.6e-5, 0.13, 52.0)),
)  # fmt: skip


@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_causes_window_requests_plots_and_cancels(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await pilot.press("d")
        assert not isinstance(app.screen, CausesScreen)
        assert notices(app)[-1] == "causes need a complete measurement: m measures"
        await measured(app, pilot)
        await pilot.press("d")
        assert isinstance(app.screen, CausesScreen)
        assert engine(app).commands[-1] == "causes"
        await say(app, pilot, events.WorkingProgress(BF16, "running each module as cast by itself", 12, 48))
        await until(pilot, lambda: "25 %" in screen(app))
        drawn = [
            line
            for line in screen(app).splitlines()
            if re.search("[\u2801-\u28ff]", line.partition("as measured")[2] or line)
        ]
        assert len(drawn) > 3, "a line of dots falls from the first layer to the last"
        assert re.search(r"layers.0 +layers.1 +layers.2", screen(app))
        await say(app, pilot, events.JobDone(BF16, jobs.CAUSES.ask(None), CAUSES), events.Idle())
        text = screen(app)
        assert f"62.0 % of the output's drift enters at {DOWN}" in text
        assert "add up to 1.500e-04" in text.replace("\n", " ")
        assert "41.00 dB" in text
        assert "layers.1" in text
        await pilot.press("escape")
        assert engine(app).commands[-1] == "causes"  # told already: nothing to stop
        await measured(app, pilot, Recipe((Rule("*", "float16"),)))
        assert app.controller.experiment.results.causes is None
        await pilot.press("d")
        recipe = app.controller.experiment.recipe
        await say(app, pilot, events.WorkingProgress(recipe, "running each module as cast by itself", 1, 48))
        await pilot.press("escape")
        assert engine(app).commands[-2:] == ["causes", "cancel causes"]
        assert not isinstance(app.screen, CausesScreen)


def found_so_far(recipe: Recipe, *names: str) -> events.JobGrown:
    """The first of 48 modules are measured, each with a smaller drift than the one before."""
    parts = tuple(Contribution(name, 1, 1e-4 / 2**at, 0.5 / 2**at, 40.0 + at) for at, name in enumerate(names))
    told = dataclasses.replace(CAUSES, causes=parts, together=sum(part.drift for part in parts))
    return events.JobGrown(recipe, jobs.CAUSES.ask(None), PartialAttribution(told, len(names), 48))


UP = "model.layers.2.mlp.up_proj"


@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_causes_are_shown_as_found_and_stay_after_a_cancel(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await measured(app, pilot)
        await pilot.press("d")
        await say(app, pilot, found_so_far(BF16, UP))
        assert "Drift over depth: 1 of 48" in screen(app)
        assert marked_line(app).startswith(f"▌ {UP}")
        assert "So far: 50.0 % of the output's drift enters" in screen(app)
        await say(app, pilot, found_so_far(BF16, DOWN, UP))
        assert "Drift over depth: 2 of 48" in screen(app)
        assert chosen(app) == DOWN, "the cursor is at the top until it is moved"
        await pilot.press("down")
        assert chosen(app) == UP
        await say(app, pilot, found_so_far(BF16, DOWN, "lm_head", UP))
        assert chosen(app) == UP, "it stays on its module"
        await pilot.press("escape")
        assert engine(app).commands[-1] == "cancel causes"
        await say(app, pilot, events.Stopped(BF16, "causes"), events.Idle())
        assert isinstance(app.screen, CausesScreen)
        assert not missing(app, "Drift over depth: stopped after 3 of 48", "lm_head")
        await pilot.press("escape")
        assert not isinstance(app.screen, CausesScreen)
        await pilot.press("d")
        assert "lm_head" in screen(app), "what was found is kept until the new measurement finds something"
        await say(
            app, pilot, found_so_far(BF16, UP), events.JobDone(BF16, jobs.CAUSES.ask(None), CAUSES), events.Idle()
        )
        assert "of 48" not in screen(app)
        assert f"62.0 % of the output's drift enters at {DOWN}" in screen(app)


async def test_enter_in_the_causes_window_goes_to_the_module() -> None:
    async with launched(size=SMALL) as (app, pilot):
        await measured(app, pilot)
        await pilot.press("d", "enter")
        assert isinstance(app.screen, CausesScreen), "no module is found yet"
        await say(app, pilot, events.JobDone(BF16, jobs.CAUSES.ask(None), CAUSES), events.Idle())
        await pilot.press("j", "enter")
        await pilot.pause()
        assert not isinstance(app.screen, CausesScreen)
        assert cursor(app) == UP


@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_casting_a_cause_back_measures_the_causes_again(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await measured(app, pilot)
        await pilot.press("d")
        await say(app, pilot, events.JobDone(BF16, jobs.CAUSES.ask(None), CAUSES), events.Idle())
        before = app.controller.experiment.plan.planned_bytes
        await pilot.press("x")
        await pilot.pause()
        put_back = BF16.then(Rule(DOWN, "float32"))
        assert app.controller.experiment.recipe == put_back
        weight = 2 * app.controller.experiment.tree.tensors[f"{DOWN}.weight"].numel
        assert app.controller.experiment.plan.planned_bytes == before + weight
        assert notices(app)[-1].startswith(f"{DOWN} is in float32 again: {human_bytes(weight)} more, ")
        assert (engine(app).recipes[-1], engine(app).commands[-1]) == (put_back, "causes")
        assert "put back" in marked_line(app)
        assert screen(app).count("put back") == 1
        await pilot.press("x")
        assert app.controller.experiment.recipe == put_back
        assert notices(app)[-1] == f"{DOWN} already has the reference's dtype"
        await pilot.press("u")
        assert app.controller.experiment.recipe == BF16
        assert "put back" not in screen(app)
        assert f"▌ {DOWN[:20]}" in screen(app), "the causes under these rules are known"
        assert engine(app).commands[-1] == "cancel causes"
        await pilot.press("x")
        await measured(app, pilot, put_back)
        await say(app, pilot, found_so_far(put_back, UP))
        assert "put back" in marked_line(app), "until all of the causes are known again"
        after = dataclasses.replace(CAUSES, causes=CAUSES.causes[1:])
        await say(app, pilot, events.JobDone(put_back, jobs.CAUSES.ask(None), after), events.Idle())
        assert "put back" not in screen(app)
        assert chosen(app) == UP
        await pilot.press("escape")
        assert not isinstance(app.screen, CausesScreen)


def test_module_is_cast_back_to_the_dtype_of_the_reference() -> None:
    tensors = (
        ("narrow", "bfloat16"), ("single", "float32"), ("double", "float64"), ("both.a", "float64"), ("both.b", "bfloat16"),
    )  # fmt: skip
    tree = Tree([TensorInfo(f"{name}.weight", (4, 4), dtype) for name, dtype in tensors])
    rules = [str(reference_rule(tree, name)) for name in ("narrow", "single", "double", "both", "")]
    assert rules == ["narrow=float32", "single=float32", "double=stored", "both=float32", "*=float32"]


async def test_drift_pane_shows_limits_and_noise_floor() -> None:
    app = make_app()
    app.controller.experiment.thresholds = LIMITS
    for size in (WIDE, SMALL):
        async with running(app, size) as pilot:
            await measured(app, pilot)
            floor = NoiseFloor(("eager attention",), 256, 128.0, 1e-5, 1e-7, 9e-13, 1.0)
            await say(app, pilot, events.JobDone(None, jobs.FLOOR.ask(None), floor))
            assert not missing(
                app,
                "FAIL",
                "KL 0.00025 > 0.0001 nats",
                "SQNR 40 ≥ 30 dB",
                "same top-1 98 < 99 %",
                "KL 9.0e-13 nats, 128.0 dB",
                " small  no worse than llama.cpp Q8_0",
                "● ready",
            )
            floor = dataclasses.replace(floor, sqnr_db=30.0, kl_mean=9e-4)
            await say(app, pilot, events.JobDone(None, jobs.FLOOR.ask(None), floor))
            assert " under the floor  noise" in screen(app)
        app = make_app()
        app.controller.experiment.thresholds = LIMITS


@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_drift_pane_names_the_remedy_for_a_nonfinite_output(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await pilot.press("a")
        assert engine(app).recipes == []
        await measured(app, pilot)
        found = NonFiniteDiagnosis(
            "activation", DOWN, "model.layers.1.mlp", "mul", "float16", 65504.0, (), 1.1e4, 2.1e5, ("model.layers.1.mlp=float32",)
        )  # fmt: skip
        await say(app, pilot, events.JobDone(BF16, jobs.NONFINITE.ask(None), found))
        words = " ".join(" ".join(line.split()) for line in screen(app).splitlines())
        assert "a applies" in words, screen(app)
        assert screen(app).splitlines()[-1].lstrip().startswith("a make it finite")
        assert "mul" in words
        assert "model.layers.1.mlp →" in words, screen(app)
        await pilot.press("w")
        assert app.screen.tree_view.current.name == "model.layers.1.mlp", "where it begins, whatever drifts most"
        await pilot.press("w")
        assert app.screen.tree_view.current.name != "model.layers.1.mlp"
        await pilot.press("a")
        assert app.controller.experiment.recipe.rules[-1] == Rule("model.layers.1.mlp", "float32")
        assert app.controller.experiment.results.nonfinite is None


@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_measurements_in_the_history_can_be_pinned_compared_and_restored(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await pilot.press("H")
        assert not isinstance(app.screen, MeasurementsScreen)
        await measured(app, pilot)
        half = Recipe((Rule("*", "float16"),))
        await measured(app, pilot, half, 1e-4)
        await measured(app, pilot, half.then(Rule("lm_head", "float32")), 2e-4)
        assert [len(entry.recipe.rules) for entry in app.controller.experiment.measured] == [1, 1, 2]
        await pilot.press("H")
        assert isinstance(app.screen, MeasurementsScreen)
        text = screen(app)
        assert not missing(app, "*=float16, lm_head=float32", "across: planned MiB, up: KL, nats")
        assert ("98.00 %" in text) == (size == WIDE), "at 80 columns it gives way to the rules"
        await pilot.press("j", "j", "p")
        assert [entry.pinned for entry in app.controller.experiment.measured] == [True, False, False]
        assert "1*" in screen(app)
        await pilot.press("c", "j", "c")
        await pilot.pause()
        assert isinstance(app.screen, Overlay)
        assert not missing(app, "only in 1", "only in 3", "lm_head=float32")
        await pilot.press("escape")
        await pilot.press("k", "enter")
        await pilot.pause()
        assert not isinstance(app.screen, MeasurementsScreen)
        assert app.controller.experiment.recipe == BF16
        assert engine(app).recipes[-1] == BF16
        await pilot.press("u")
        assert len(app.controller.experiment.recipe) == 2


def llama_with_a_large_weight(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5
    model.save_pretrained(folder)


async def test_one_key_applies_the_remedy_for_a_weight_that_overflows(tmp_path: Path) -> None:
    llama_with_a_large_weight(tmp_path / "llama")
    app = app_on("thread", str(tmp_path / "llama"))
    async with running(app, SMALL) as pilot:
        app.query_one(ModuleTree).focus()
        await pilot.press("3")
        await until(pilot, lambda: app.controller.experiment.results.nonfinite is not None)
        assert "up_proj" in screen(app)
        assert app.controller.experiment.results.nonfinite is not None
        assert app.controller.experiment.results.nonfinite.remedy == ("model.layers.1.mlp.up_proj.weight=bfloat16",)
        await pilot.press("a")
        await until(pilot, lambda: app.controller.experiment.results.report is not None)
        assert app.controller.experiment.results.report is not None
        assert app.controller.experiment.results.report.output.nonfinite == 0
        await until(pilot, lambda: app.controller.experiment.floor is not None and not app.controller.activity.busy)
        await pilot.press("d")
        await until(pilot, lambda: app.controller.experiment.results.causes is not None)
        assert app.controller.experiment.results.causes is not None
        headline = causes_headline(app.controller.experiment.results.causes)[:40]
        await until(pilot, lambda: headline in screen(app))
        await pilot.press("escape", "H")
        await pilot.pause()
        await until(pilot, lambda: "not finite" in screen(app))
