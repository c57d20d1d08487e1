"""The worst modules in the Drift pane: which ones they are can be told at every size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.helpers.recording_engine import report, say
from tests.helpers.scenes import MIXED, opened
from tests.helpers.screen_text import lines, screen, until

from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.results.drift import DriftReport, ModuleDrift
from dtype_engine.results.meaning import sqnr_limits
from dtype_engine.service import events
from dtype_tui.rendering.worst_lines import shortened_uniquely, worst_lines

SCALE = (0.0, 80.0)
NAMES = [f"model.layers.{layer}.{part}" for layer in range(12) for part in ("self_attn.o_proj", "mlp.down_proj")]


def tree_of_names() -> Tree:
    return Tree(TensorInfo(f"{name}.weight", (8, 8), "float32") for name in NAMES)


def test_module_name_is_shortened_to_a_unique_end_or_not_at_all() -> None:
    assert shortened_uniquely("model.layers.10.mlp.down_proj", 29, NAMES) == "model.layers.10.mlp.down_proj"
    assert shortened_uniquely("model.layers.10.mlp.down_proj", 20, NAMES) == "…10.mlp.down_proj"
    assert shortened_uniquely("model.layers.10.mlp.down_proj", 17, NAMES) == "…10.mlp.down_proj"
    assert shortened_uniquely("model.layers.10.mlp.down_proj", 16, NAMES) is None
    both = ["encoder.layers.1.fc1", "decoder.layers.1.fc1"]
    assert shortened_uniquely(both[0], 19, both) is None
    assert shortened_uniquely("x" * 40, 19, ["x" * 40]) is None
    assert shortened_uniquely("a.b", -3, ["a.b"]) is None, "a pane that is not shown has no width"


def test_too_long_module_name_is_shown_below_its_figure() -> None:
    both = ["encoder.layers.1.fc1", "decoder.layers.1.fc1"]
    drawn = [
        text.plain for text in worst_lines([ModuleDrift(both[0], 30.0, 1.0, 0)], 22, both, SCALE, sqnr_limits(None))
    ]
    assert drawn == ["worst 30.00 \n  encoder.layers.1.fc1"]


def test_drift_bar_grows_with_drift_and_is_omitted_for_a_long_name() -> None:
    worst = [ModuleDrift(NAMES[-1], 20.0, 1.0, 0), ModuleDrift(NAMES[0], 60.0, 1.0, 0)]
    assert [text.plain for text in worst_lines(worst, 40, NAMES, SCALE, sqnr_limits(None))] == [
        "worst 20.00 ▄▄▄▁ …11.mlp.down_proj",
        "dB    60.00 ▄▁▁▁ …0.self_attn.o_proj",
    ]
    assert [text.plain for text in worst_lines(worst, 34, NAMES, SCALE, sqnr_limits(None))] == [
        "worst 20.00 …11.mlp.down_proj",
        "dB    60.00 …0.self_attn.o_proj",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [(120, 36), (80, 24), (200, 50)])
async def test_names_of_worst_modules_are_distinguishable_at_every_size(size: tuple[int, int]) -> None:
    worst = ["model.layers.10.self_attn.o_proj", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]
    modules = tuple(ModuleDrift(name, 34.5 + place, 1e-3, 0) for place, name in enumerate(worst))
    async with opened(size=size, tree=tree_of_names()) as (app, pilot):
        app.controller.apply_recipe(MIXED)
        await say(app, pilot, events.ModulesMeasured(MIXED, modules))
        for so_far in (True, False):
            if not so_far:
                await say(app, pilot, events.Measured(MIXED, report(MIXED, 1e-2, modules)), events.Idle())
            figures = [f"{34.5 + place:.2f}" for place in range(3)]
            shown = [next(line for line in lines(app) if f" {figure} " in line) for figure in figures]
            for line, end in zip(shown, ("10.self_attn.o_proj", "0.self_attn.o_proj", "1.mlp.down_proj"), strict=True):
                assert f"…{end}" in line or f".{end}" in line, screen(app)
            assert "dB" in screen(app)


async def test_drift_bar_of_a_module_has_the_same_length_in_drift_pane_and_tree() -> None:
    decibels = (30.0, 41.0, 46.0, 60.0)
    modules = tuple(ModuleDrift(f"model.layers.{layer}", value, 1e-3, 0) for layer, value in enumerate(decibels))
    async with opened(tree=tree_of_names()) as (app, pilot):
        app.controller.apply_recipe(MIXED)
        await say(app, pilot, events.Measured(MIXED, report(MIXED, 1e-2, modules)), events.Idle())
        await pilot.press("F")
        app.main.tree_view.go_to("model.layers.0")
        await pilot.pause()
        tree, pane = [line[:80] for line in lines(app)], [line[80:] for line in lines(app)]
        shares = []
        for value in decibels[:3]:
            bars = (_after(f" {value:.1f} ", tree), _after(f" {value:.2f} ", pane))
            shares.append([(bar.count("▄") + bar.count("▖") / 2) / len(bar) for bar in bars])
        assert all(abs(one - other) <= 1 / 6 for one, other in shares), shares
        assert shares[0][1] == 1.0, "the worst module has a full bar"


def _after(words: str, drawn: list[str]) -> str:
    """Return the text after these words, up to the next blank: of the module, not of the list that holds it."""
    (line,) = (line for line in drawn if words in line and "▾ layers" not in line)
    return line.split(words)[1].split()[0]


def of_nan(modules: tuple[ModuleDrift, ...]) -> DriftReport:
    """A report of a reference that is NaN everywhere."""
    whole = report(MIXED, 1e-2, modules)
    figures = dict.fromkeys(("mean_abs", "max_abs", "rel_l2", "sqnr_db", "cosine"), math.nan)
    counts = {"nonfinite_reference": 100, "nonfinite_candidate": 100, "kl_mean": None, "top1_agreement": None}
    return replace(whole, output=replace(whole.output, **figures, **counts, values={}))


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (200, 50)])
async def test_modules_that_are_not_finite_in_the_reference_are_the_worst(size: tuple[int, int]) -> None:
    healthy, partly, all_of_it = "model.layers.0", "model.layers.1", "model.layers.2"
    modules = (
        ModuleDrift(healthy, 45.67, 1e-3, 0),
        ModuleDrift(partly, 44.44, 1e-3, 0, 3),
        ModuleDrift(all_of_it, None, 0.0, 0, 64),
    )
    async with opened(size=size, tree=tree_of_names()) as (app, pilot):
        app.controller.apply_recipe(MIXED)
        await say(app, pilot, events.Measured(MIXED, of_nan(modules)), events.Idle())
        worst = [drift.name for drift in app.controller.experiment.results.worst_modules()]
        assert worst == [all_of_it, partly]
        await until(pilot, lambda: "not finite 100 of 100 in" in screen(app))
        assert "worst not finite" in screen(app)
        await pilot.press("w")
        assert app.main.tree_view.current.name == all_of_it
        await say(app, pilot, events.Measured(MIXED, report(MIXED, 1e-2, modules[:1])), events.Idle())
        await until(pilot, lambda: "worst 45.67" in screen(app))
