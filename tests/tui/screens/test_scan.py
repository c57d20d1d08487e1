"""Scan and search in the app: what the keys do, with a real scan of the demo's small sibling fed by hand, and the real worker."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.helpers.recording_engine import demo_tree, engine, launched, model_ready, report, say
from tests.helpers.screen_text import is_measured, lines, missing, notices, screen, until
from tests.helpers.slow_net import app_on
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Recipe, Rule, make_plan, tensor_bytes
from dtype_engine.recipe.loading import TRANSFORMERS
from dtype_engine.recipe.minimize import minimize
from dtype_engine.results.drift import NATS
from dtype_engine.results.scan import ScanReport, WeightScore
from dtype_engine.search.families import FAMILIES
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.screens.optimise import OptimiseScreen
from dtype_tui.screens.scan import ScanScreen, short_kinds
from dtype_tui.screens.scan_setup import ScanSetup
from dtype_tui.state import front_facts
from dtype_tui.widgets.module_tree import ModuleTree

DTYPES = ("bfloat16", "int8")


def scan_report(sequences: int = 2, of: int = 2) -> ScanReport:
    """Made-up scores: the n-th weight n·1e-6 in int8 and a tenth of it in bfloat16; the embedding overflows nothing."""
    weights = []
    for place, (name, tensor) in enumerate(demo_tree().tensors.items(), 1):
        for dtype, scale in (("float32", 0.0), ("bfloat16", 1e-7), ("int8", 1e-6)):
            score = place * scale
            weights.append(WeightScore(name, dtype, tensor_bytes(tensor, dtype), score, score / 10))
    return ScanReport(
        "demo", "cpu", "float32", "prompts", NATS, False, 4, sequences, of, DTYPES, 1.0, 15.0, tuple(weights)
    )


@asynccontextmanager
async def opened(size: tuple[int, int] = (120, 36)) -> AsyncIterator[tuple[DtypeApp, Pilot[None]]]:
    async with launched(size=size) as (app, pilot):
        await say(app, pilot, model_ready(app), events.Idle())
        yield app, pilot


@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_scan_with_roundings_shows_what_they_do_to_the_errors_of_layers(size: tuple[int, int]) -> None:
    async with opened(size) as (app, pilot):
        plain = scan_report()
        await say(app, pilot, events.ScanUpdated(plain, True))
        await pilot.press("s")
        assert "rounding" not in screen(app)
        await pilot.press("escape")
        first = plain.weights[-1].name
        weights = tuple(
            dataclasses.replace(each, dtype="int8:gptq", rounding_gain=3.2 if each.name == first else None)
            if each.dtype == "int8"
            else each
            for each in plain.weights
        )
        rounded = dataclasses.replace(plain, dtypes=("bfloat16", "int8:gptq"), weights=weights)
        await say(app, pilot, events.ScanUpdated(rounded, True))
        await pilot.press("s", "right")
        rows = [line for line in lines(app) if line.rstrip().endswith("3.20x less error")]
        assert not missing(app, "rounding")
        assert len(rows) == 1
        assert first.removesuffix(".weight")[-8:] in rows[0]
        await pilot.press("a")
        assert "3.20x less error" in screen(app)


async def test_key_s_asks_for_dtypes_and_starts_a_scan() -> None:
    async with opened() as (app, pilot):
        await pilot.press("o")
        assert "s starts one" in notices(app)[-1]
        await pilot.press("s")
        assert isinstance(app.screen, ScanSetup)
        await pilot.press("space", "down", "enter")  # bfloat16 is left out
        assert engine(app).commands[-1] == f"scan {','.join(FAMILIES[TRANSFORMERS].dtypes[1:])}"
        assert app.controller.activity.what == "scan"


async def test_last_line_of_the_dtypes_to_scan_chooses_how_formats_are_rounded() -> None:
    async with opened() as (app, pilot):
        await pilot.press("s", "up")
        assert "rounded           to the nearest values" in screen(app)
        await pilot.press("space", "space")
        assert "rounded           by gptq, where a format takes it" in screen(app)
        await pilot.press("enter")
        assert engine(app).commands[-1] == "scan bfloat16,float16,float8_e4m3fn:gptq,int8:gptq"


@pytest.mark.slow
async def test_scan_window_resumes_a_cancelled_scan_and_space_pauses_it() -> None:
    async with opened() as (app, pilot):
        await pilot.press("s", "enter")
        asked = engine(app).commands[-1]
        await say(app, pilot, events.ScanUpdated(scan_report(1, 2), False))
        await pilot.press("s")
        assert isinstance(app.screen, ScanScreen)
        await pilot.press("space")
        assert engine(app).commands[-1] == "pause"
        assert "paused" in screen(app)
        await pilot.press("space")
        assert engine(app).commands[-1] == "go on"
        await pilot.press("escape", "escape")
        assert engine(app).commands[-1] == "cancel"
        await say(app, pilot, events.Stopped(app.controller.experiment.recipe, "scan"), events.Idle())
        await pilot.press("s")
        assert engine(app).commands[-1] == asked
        assert "1 of 2 sequences" in screen(app)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_tree_shows_the_sum_of_scan_scores_of_each_module(size: tuple[int, int]) -> None:
    found = scan_report()
    async with opened(size) as (app, pilot):
        before = screen(app)
        assert "nats" not in before.splitlines()[1]
        await say(app, pilot, events.ScanUpdated(found, True))
        lines = screen(app).splitlines()
        assert "nats bf16" in lines[1]
        (fold,) = (line for line in lines if line.strip(" ▌").startswith("▸ 0 … 5 "))
        await pilot.press("j", "j", "j", "j", "l")
        await pilot.pause()
        (row,) = (line for line in screen(app).splitlines() if line.strip(" ▌").startswith("▸ 3 "))
        for name, line in (("model.layers.", fold), ("model.layers.3.", row)):
            scores = (s.score for s in found.weights if s.dtype == "bfloat16" and s.name.startswith(name))
            assert f"{math.fsum(scores):.1e}" in line
        whole = math.fsum(score.score for score in found.weights if score.dtype == "bfloat16")
        assert f"{whole:.1e}" in lines[2]


@pytest.mark.slow
@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_ranking_of_scan_scores_can_be_sorted_and_enter_goes_to_the_module_in_the_tree(
    size: tuple[int, int],
) -> None:
    found = scan_report()
    async with opened(size) as (app, pilot):
        await say(app, pilot, events.ScanUpdated(found, True))
        await pilot.press("s")
        view = app.screen
        assert isinstance(view, ScanScreen)
        in_bf16 = sorted((s for s in found.weights if s.dtype == "bfloat16"), key=lambda s: -s.score)
        assert view._names[:3] == [score.name for score in in_bf16[:3]]
        await pilot.press("right")
        assert app.controller.experiment.scan.dtype == "int8"
        assert "‹ i8 ›" in screen(app)
        await pilot.press("b")
        stored = {name: tensor.nbytes for name, tensor in app.controller.experiment.tree.tensors.items()}
        by_byte = sorted(
            (s for s in found.weights if s.dtype == "int8" and stored[s.name] > s.bytes),
            key=lambda s: -s.score / (stored[s.name] - s.bytes),
        )
        assert view._names[0] == by_byte[0].name
        await pilot.press("a")
        assert len(view._names) == 2 * len(in_bf16)
        await pilot.press("a", "down", "down")
        wanted = view._names[view.query_one(DataTable).cursor_row]
        await pilot.press("enter")
        assert not isinstance(app.screen, ScanScreen)
        assert app.query_one(ModuleTree).current.name == wanted
        assert "nats i8" in screen(app).splitlines()[1]


@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_sensitivity_map_has_a_row_for_each_layer_and_a_column_for_each_kind_of_weight(
    size: tuple[int, int],
) -> None:
    async with opened(size) as (app, pilot):
        await say(app, pilot, events.ScanUpdated(scan_report(), True))
        await pilot.press("s", "m")
        lines = screen(app).splitlines()
        assert set(lines[1].split()) > {"layer", "q", "k", "v", "o", "gate", "up", "down"}
        assert [line.split()[0] for line in lines[2:8]] == [f"model.layers.{layer}" for layer in range(6)]
        assert "█" in lines[7]
        assert "·" in lines[2] or "░" in lines[2]
        assert any("model.embed_tokens" in line for line in lines)


async def test_scan_of_earlier_inputs_is_discarded() -> None:
    async with opened() as (app, pilot):
        await say(app, pilot, events.ScanUpdated(scan_report(), True))
        await pilot.press("2")
        await until(pilot, lambda: "scan predicts" in screen(app))
        experiment = app.controller.experiment
        experiment.model = msgspec.structs.replace(experiment.model, inputs="another text")
        app.main.show_all()
        await pilot.pause()
        assert "scan predicts" not in screen(app)
        await pilot.press("o")
        assert not isinstance(app.screen, OptimiseScreen)
        await pilot.press("s")
        assert isinstance(app.screen, ScanSetup)
        assert app.controller.experiment.scan.report is None


def test_short_headings_of_the_sensitivity_map_are_distinct() -> None:
    assert short_kinds(("self_attn.q_proj", "mlp.down_proj"), 5) == ["q", "down"]
    assert short_kinds(("attn.dense", "mlp.dense"), 10) == ["attn.dense", "mlp.dense"]
    heads = short_kinds(("first.long_name_a", "first.long_name_b"), 5)
    assert len(set(heads)) == 2


async def test_predicted_drift_is_shown_beside_the_measured_drift() -> None:
    found = scan_report()
    async with opened() as (app, pilot):
        await say(app, pilot, events.ScanUpdated(found, True))
        await pilot.press("2")
        whole = math.fsum(score.score for score in found.weights if score.dtype == "bfloat16")
        assert f"scan predicts {whole:.1e} nats per token" in screen(app)
        recipe = app.controller.experiment.recipe
        await say(app, pilot, events.Measured(recipe, report(recipe)))
        text = screen(app)
        assert "KL 2.50e-4" in text  # measured
        assert f"scan predicts {whole:.1e}" in " ".join(text.split())
        (point,) = app.controller.experiment.scan.measured
        assert (point.predicted, point.measured) == (pytest.approx(whole), 2.5e-4)
        await pilot.press("5")  # float8_e4m3fn was not scanned
        assert "scan predicts" not in screen(app)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_recipe_of_a_point_on_the_pareto_front_is_applied(size: tuple[int, int]) -> None:
    async with opened(size) as (app, pilot):
        await say(app, pilot, events.ScanUpdated(scan_report(), True))
        await pilot.press("o")
        view = app.screen
        assert isinstance(view, OptimiseScreen)
        assert view.front is not None
        first = view.index
        await pilot.press("left", "left", "right")
        assert view.index == first - 1
        await pilot.press("home")
        assert view.index == 0
        await until(pilot, lambda: view.recipe is not None)
        assert view.recipe is not None
        planned = make_plan(app.controller.experiment.tree, view.recipe)
        tensors = app.controller.experiment.tree.tensors
        matrices = {name for name, tensor in tensors.items() if len(tensor.shape) > 1}
        assert {planned.dtypes[name] for name in matrices} == {"int8"}
        assert {planned.dtypes[name] for name in tensors.keys() - matrices} == {"bfloat16"}  # norms stay wide
        assert "i8" in screen(app)
        await pilot.press("enter")
        assert engine(app).recipes[-1] == view.recipe == app.controller.experiment.recipe
        await say(app, pilot, events.Measured(view.recipe, report(view.recipe)))
        await pilot.pause()
        assert not missing(app, "measured 2.5e-04", "x")
        await pilot.press("enter")
        await until(pilot, lambda: "already applied" in screen(app))
        await pilot.press("right")
        await until(pilot, lambda: "already applied" not in screen(app))
        await pilot.press("m")
        await until(pilot, lambda: "measuring this point and its neighbors" in screen(app))
        await pilot.press("u")
        assert app.controller.experiment.recipe == Recipe()
        await pilot.press("escape")
        assert not isinstance(app.screen, OptimiseScreen)


@pytest.mark.slow
async def test_enter_on_a_point_waits_for_its_rules_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    known = threading.Event()

    def slow(tree: Tree, dtypes: Mapping[str, str]) -> Recipe:
        known.wait(30)
        return minimize(tree, dtypes)

    monkeypatch.setattr(front_facts, "minimize", slow)
    async with opened((80, 24)) as (app, pilot):
        await say(app, pilot, events.ScanUpdated(scan_report(), True))
        await pilot.press("o", "c")
        await until(pilot, lambda: "c compares when they are known" in screen(app))
        await pilot.press("enter")
        await until(pilot, lambda: "Computing its rules: applied when they are known" in screen(app))
        await pilot.press("left", "left")
        await until(pilot, lambda: "Computing its rules…" in screen(app))  # the user walked on
        await pilot.press("enter")
        view = app.screen
        assert isinstance(view, OptimiseScreen)
        assert app.controller.experiment.recipe == Recipe()
        known.set()
        await until(pilot, lambda: app.controller.experiment.recipe == view.recipe != Recipe())
        assert "still computed" not in screen(app)
        await pilot.press("right")
        await until(pilot, lambda: view.recipe is not None)
        assert engine(app).recipes == [app.controller.experiment.recipe], "one Enter, one recipe"


@asynccontextmanager
async def front_of(
    scores: ScanReport, size: tuple[int, int] = (120, 36)
) -> AsyncIterator[tuple[DtypeApp, Pilot[None], OptimiseScreen]]:
    """The Pareto front of a scan of a model that transformers loads."""
    async with launched(size=size) as (app, pilot):
        known = app.controller.experiment.tree
        classes = {name: "Linear" if name.endswith("_proj") else "Module" for name in known.modules}
        tree = Tree(known.tensors.values(), classes)
        ready = msgspec.structs.replace(model_ready(app), loader="transformers", tree=tree)
        await say(app, pilot, ready, events.Idle())
        await say(app, pilot, events.ScanUpdated(dataclasses.replace(scores, loader="transformers"), True))
        await pilot.press("o")
        view = app.screen
        assert isinstance(view, OptimiseScreen)
        await until(pilot, lambda: view.facts is not None)
        yield app, pilot, view


@pytest.mark.slow
@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_every_point_of_the_front_says_which_programs_load_it(size: tuple[int, int]) -> None:
    async with front_of(scan_report(), size) as (app, pilot, view):
        await pilot.press("home")
        await until(pilot, lambda: view.facts is not None and "loads in: transformers ≈" in screen(app))
        assert "dtype-engine ✓" in screen(app)
        assert "vLLM ✗" in screen(app)  # int8 with wide activations
        assert "less at no more drift if only dtype-engine reads it (f)" in screen(app)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_dtypes_to_scan_are_those_of_the_program_that_is_to_load_the_model(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await say(app, pilot, msgspec.structs.replace(model_ready(app), loader="transformers"), events.Idle())
        await pilot.press("s")
        assert "to be loaded by ‹ transformers ›" in screen(app)
        await pilot.press("right")
        assert "to be loaded by ‹ vLLM ›" in screen(app)
        await pilot.press("left", "right", "enter")
        assert engine(app).commands[-1] == f"scan {','.join(FAMILIES['vllm'].dtypes)}"
        await say(app, pilot, events.ScanUpdated(dataclasses.replace(scan_report(), loader="transformers"), True))
        await pilot.press("o")
        assert "loads in vLLM" in screen(app)


async def test_model_that_transformers_does_not_load_is_scanned_for_this_program() -> None:
    async with opened() as (app, pilot):
        await pilot.press("s", "right")
        assert "to be loaded by ‹ dtype-engine ›" in screen(app)
        await pilot.press("enter")
        assert engine(app).commands[-1] == f"scan {','.join(FAMILIES['own'].dtypes)}"


@pytest.mark.slow
async def test_key_f_walks_through_the_programs_that_are_to_load_the_front() -> None:
    async with front_of(scan_report()) as (app, pilot, view):
        seen = []
        for _ in range(5):
            assert view.front is not None
            seen.append(view.front.formats)
            await pilot.press("f")
        assert seen == ["transformers", "vllm", "sglang", "llama.cpp", "own"]
        assert view.front is not None
        assert view.front.formats == "transformers"
        assert "loads in transformers" in screen(app)
        assert view.view.limits.lines == ("formats transformers",)


@pytest.mark.slow
async def test_front_names_a_format_that_fits_where_no_point_does() -> None:
    async with front_of(scan_report()) as (app, pilot, _):
        await pilot.press("f", "f", "f", "f", "slash", *"20%", "enter")
        await until(pilot, lambda: "i4@128 weights would fit in 552.97 KiB: scan them, too" in screen(app), 60)
        assert "nothing fits" in screen(app)


@pytest.mark.slow
async def test_front_names_a_point_that_is_no_larger_and_drifts_far_less() -> None:
    whole = scan_report()
    better = (
        dataclasses.replace(each, dtype="float16", score=each.score / 100)
        for each in whole.weights
        if each.dtype == "bfloat16"
    )
    found = dataclasses.replace(whole, dtypes=(*DTYPES, "float16"), weights=(*whole.weights, *better))
    async with front_of(found) as (app, pilot, _):
        await pilot.press("escape", "2", "o")  # everything in bfloat16
        await until(pilot, lambda: "drifts 37 x less, mainly by bf16 → f16" in screen(app))


@pytest.mark.slow
async def test_pareto_front_includes_scanned_kv_caches() -> None:
    async with opened() as (app, pilot):
        whole, experiment = scan_report(), app.controller.experiment
        form = "kv:int8@token"
        caches = tuple(WeightScore(name, form, 0, 1e-9, 1e-10) for name in experiment.tree.caches)
        scanned = dataclasses.replace(whole, dtypes=(*DTYPES, form), weights=(*whole.weights, *caches))
        await say(app, pilot, events.ScanUpdated(scanned, True))
        app.controller.set_context(512, 3)
        await pilot.press("o", "end")
        view = app.screen
        assert isinstance(view, OptimiseScreen)
        elements = 6 * 2 * 3 * 512 * 2 * 24  # layers, keys and values, sequences, tokens, heads, width
        assert view.solution is not None
        assert view.solution.bytes == experiment.tree.stored_bytes + 4 * elements
        assert f"KV cache {4 * elements / 2**20:.2f} MiB at 512 tokens × 3" in screen(app)
        await pilot.press("home")
        assert f"KV cache {(elements + elements // 24 * 4) / 2**10:.2f} KiB" in screen(app)
        await until(pilot, lambda: view.recipe is not None)
        assert view.recipe is not None
        assert set(make_plan(experiment.tree, view.recipe).caches.values()) == {"int8@token"}
        await pilot.press("enter")
        await say(app, pilot, events.Measured(view.recipe, report(view.recipe)))
        await pilot.pause()
        assert view._measured() == [(view.solution.bytes, 2.5e-4)]


async def test_pareto_front_shows_measured_recipes_with_zero_drift() -> None:
    async with opened((80, 24)) as (app, pilot):
        for rule, kl in (("*.mlp=bfloat16", 3e-5), ("*norm*=float32", 0.0)):
            recipe = Recipe((Rule.parse(rule),))
            app.controller.experiment.push(recipe)
            measured = report(recipe)
            output = dataclasses.replace(measured.output, kl_mean=kl)
            await say(app, pilot, events.Measured(recipe, dataclasses.replace(measured, output=output)), events.Idle())
        await say(app, pilot, events.ScanUpdated(scan_report(), True), events.Idle())
        await pilot.press("o")
        await pilot.pause()
        plotted = str(app.screen.query_one("#front-plot", Static).content).split("\n")
        (zero,) = (line for line in plotted if line.lstrip().startswith("0 ┤"))
        assert zero.count("x") == 1
        assert sum(line.count("x") for line in plotted) == 2
        assert "stopped" not in screen(app)


async def test_pareto_front_of_an_incomplete_scan_says_so() -> None:
    async with opened() as (app, pilot):
        await say(app, pilot, events.ScanUpdated(scan_report(6, 25), False))
        await pilot.press("o")
        await pilot.pause()
        assert "from a running scan (24 %)" in screen(app)
        await say(app, pilot, events.Idle())
        assert "from a stopped scan (24 %)" in screen(app)


@pytest.mark.slow
async def test_limits_typed_for_the_pareto_front_are_respected() -> None:
    async with opened() as (app, pilot):
        await say(app, pilot, events.ScanUpdated(scan_report(), True))
        await pilot.press("o")
        view = app.screen
        assert isinstance(view, OptimiseScreen)

        async def typed(line: str) -> None:
            await pilot.press("slash")
            view.query_one(Input).value = line
            await pilot.press("enter")

        await typed("keep *norm*")
        await pilot.press("home")
        assert view.solution is not None
        assert {dtype for name, dtype in view.solution.dtypes.items() if "norm" in name} == {"float32"}
        await typed("alike *.{q,k,v}_proj")
        for place in range(len(view.front.points)):  # type: ignore[union-attr]
            chosen = view.front.solution_at(place).dtypes  # type: ignore[union-attr]
            assert len({chosen[f"model.layers.0.self_attn.{kind}_proj.weight"] for kind in "qkv"}) == 1
        await typed("45%")
        assert view.within is not None
        stored = app.controller.experiment.tree.stored_bytes
        assert view.within.bytes <= 0.45 * stored
        assert "best within the budget" in screen(app)
        await typed("1%")
        await until(pilot, lambda: "nothing fits: the smallest has" in screen(app))
        assert "best within" not in screen(app)
        await typed("46%")
        await until(pilot, lambda: "best within the budget" in screen(app))
        assert "nothing fits" not in screen(app)
        await typed("active 45%")
        assert view.front is not None
        assert view.front.by == "active"
        active = app.controller.experiment.tree.active_bytes()
        assert view.within.active_bytes <= 0.45 * active
        assert view.view.limits.lines.count("active 45%") == len(view.view.limits.lines) - 2
        await until(pilot, lambda: "read for a token" in screen(app))
        await typed("46%")
        assert view.front.by == "bytes"
        await until(pilot, lambda: "read for a token" not in screen(app))
        await typed("only float16")
        assert "was not scanned" in notices(app)[-1]
        await until(pilot, lambda: "was not scanned" in screen(app))
        view.query_one(Input).value = "45%"
        await pilot.press("enter")
        await until(pilot, lambda: "was not scanned" not in screen(app))
        assert "best within the budget" in screen(app)
        await typed("nonsense")
        assert "write a size (8MiB, 45%), active SIZE, keep PATTERN" in notices(app)[-1]
        await pilot.press("escape")
        await typed("clear")
        assert view.view.limits.lines == ()
        assert "no limits" in str(view.query_one("#front-title", Static).render())


@pytest.mark.slow
async def test_scan_interrupted_by_a_cast_continues_afterwards() -> None:
    app = app_on("thread", "demo")
    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: is_measured(app))
        await pilot.press("s")
        assert isinstance(app.screen, ScanSetup)
        for _ in range(4):
            await pilot.press("space", "down")  # only int8 is left
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.experiment.scan.report is not None)
        app.controller.add_rule(Rule("*.mlp", "int8"))
        await until(pilot, lambda: app.controller.experiment.results.report is not None)
        await until(pilot, lambda: app.controller.experiment.scan.finished)
        experiment = app.controller.experiment
        found = experiment.scan.prediction(experiment.tree, experiment.plan)
        assert found is not None
        assert experiment.results.report is not None
        assert found.value == pytest.approx(experiment.results.report.output.kl_mean, rel=0.5)
