from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import re
from pathlib import Path

import msgspec
import pytest
from tests.helpers.recording_engine import (
    app_of,
    demo_tree,
    engine,
    launched,
    make_app,
    model_ready,
    report,
    running,
    say,
)
from tests.helpers.scenes import inputs
from tests.helpers.screen_text import lines, missing, notices, screen, until
from textual.binding import Binding
from textual.events import Key
from textual.widgets import Input

from dtype_engine.core import dtypes
from dtype_engine.core.options import RunSettings
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.results.check import CheckReport, Finding
from dtype_engine.results.coverage import Coverage
from dtype_engine.results.drift import ImplicitCastStats, ModuleDrift
from dtype_engine.results.memory import MemoryStats
from dtype_engine.results.rounding import WeightGain
from dtype_engine.results.runs import Generation, SpeedReport, SpeedRow, Written
from dtype_engine.results.weights import ExponentHistogram, WeightError, WeightStats
from dtype_engine.service import events
from dtype_engine.service.jobs import CHECK, FLOW, GENERATE, SPEED, VALUES, GenerateText, InspectTensor
from dtype_engine.service.save_requests import RecipeRequest
from dtype_tui.app import DtypeApp
from dtype_tui.config.bindings import DIGITS
from dtype_tui.main_screen import PAUSE_S, MainScreen
from dtype_tui.screens.generation import GenerationScreen
from dtype_tui.screens.overlay import Overlay
from dtype_tui.screens.settings import SettingsScreen
from dtype_tui.screens.weight_values import cast_to, exponent_histogram, range_mark
from dtype_tui.state import engine_life
from dtype_tui.state.launch import Launch
from dtype_tui.state.preview import preview
from dtype_tui.widgets.bottom_prompt import BottomPrompt
from dtype_tui.widgets.module_tree import ModuleTree
from dtype_tui.widgets.panes.drift import DriftPane
from dtype_tui.widgets.panes.memory import MemoryPane
from dtype_tui.widgets.panes.recipe import RecipePane
from dtype_tui.widgets.prompts import CastPrompt, FilterPrompt

WIDE, SMALL = (120, 36), (80, 24)


@pytest.fixture
def app() -> DtypeApp:
    return make_app()


def tree_of(app: DtypeApp) -> ModuleTree:
    return app.query_one(ModuleTree)


async def test_tree_is_shown_before_the_engine_answers(app: DtypeApp) -> None:
    async with running(app):
        assert not missing(app, "embed_tokens", "707.8 k", "2.70 MiB")
        assert engine(app).commands == ["start"]


async def test_keys_move_in_the_tree_and_open_and_close_nodes(app: DtypeApp) -> None:
    async with running(app) as pilot:
        tree = tree_of(app)
        assert tree.current.name == ""
        await pilot.press("j", "j", "j", "down", "l", "j")
        assert tree.current.name == "model.layers.0"
        count = len(tree.rows)
        await pilot.press("l")
        assert len(tree.rows) == count + 4
        await pilot.press("l")
        assert tree.current.name == "model.layers.0.input_layernorm"
        await pilot.press("h")
        assert tree.current.name == "model.layers.0"
        await pilot.press("h")
        assert len(tree.rows) == count
        await pilot.press("h", "h", "h")
        assert tree.current.name == "model.layers"
        await pilot.press("right_square_bracket")
        assert tree.current.name == "model.norm"
        await pilot.press("G")
        assert tree.cursor == len(tree.rows) - 1
        await pilot.press("less_than_sign")
        assert tree.cursor == 0


async def test_digit_keys_cast_the_node_at_once(app: DtypeApp) -> None:
    async with running(app) as pilot:
        assert tree_of(app).go_to("model.layers.3.mlp")
        for number, dtype in enumerate(DIGITS, 1):
            await pilot.press("7" if number != 7 else "2", str(number))
            assert engine(app).recipes[-1] == Recipe((Rule("model.layers.3.mlp", dtype),))
            expected = "float32" if dtype == dtypes.STORED else dtype
            assert app.controller.experiment.plan.dtypes["model.layers.3.mlp.up_proj.weight"] == expected


async def test_keys_undo_and_redo_casts_and_remove_rules(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: "1.35 MiB" in screen(app))
        tree_of(app).go_to("model.layers.3")
        await pilot.press("3")
        await pilot.press("u")
        assert app.controller.experiment.recipe == Recipe((Rule("*", "bfloat16"),))
        await pilot.press("ctrl+r")
        assert len(app.controller.experiment.recipe) == 2
        await pilot.press("x")
        assert app.controller.experiment.recipe == Recipe((Rule("*", "bfloat16"),))
        await pilot.press("x")
        assert "rule 1 also matches tensors beyond this node" in notices(app)[-1]
        await pilot.press("u", "u", "u", "u")
        assert app.controller.experiment.recipe == Recipe()
        assert "nothing left to undo" in notices(app)[-1]
        assert [len(recipe) for recipe in engine(app).recipes] == [1, 2, 1, 2, 1, 2, 1, 0]


@pytest.mark.slow
async def test_cast_prompt_completes_format_names(app: DtypeApp) -> None:
    async with running(app) as pilot:
        tree_of(app).go_to("model.layers.3.mlp")
        await pilot.press("c", "end")
        field = app.query_one("#cast-input", Input)
        for _ in "bf16":
            await pilot.press("backspace")
        await pilot.press(*"nv", "tab")
        assert field.value == "model.layers.3.mlp=nvfp4"
        await pilot.press("tab")
        assert field.value == "model.layers.*.mlp=nvfp4", "a whole name: the pattern is next"
        for _ in "vfp4":
            await pilot.press("backspace")
        await pilot.press("backspace", *"int4")
        await pilot.pause(0.1)
        await until(pilot, lambda: "Tab: int4@g128  int4@g32  int4@g128a  then :imatrix or :gptq" in screen(app))
        await pilot.press("tab", "tab")
        assert field.value == "model.layers.*.mlp=int4@g32"
        await pilot.press("shift+tab", "enter")
        assert engine(app).recipes == [Recipe((Rule("model.layers.*.mlp", "int4@g128"),))]


async def test_cast_prompt_completes_and_casts_to_a_format_with_a_rounding(app: DtypeApp) -> None:
    async with running(app, SMALL) as pilot:
        tree_of(app).go_to("model.layers.3.mlp")
        await pilot.press("c", "end", *["backspace"] * 4)
        await pilot.press(*"int4@g32:")
        await until(pilot, lambda: "Tab: int4@g32:imatrix  int4@g32:gptq" in screen(app))
        await pilot.press("tab", "tab", "enter")
        assert engine(app).recipes == [Recipe((Rule("model.layers.3.mlp", "int4@g32:gptq"),))]
        await pilot.press("E")
        await until(pilot, lambda: screen(app).count(" i4@32:gptq ") == 3)  # there is no room for f32→
        for rule in ("*.mlp=int4@g128:imatrix", "*.mlp=int4@g128a:gptq"):
            app.controller.add_rule(Rule.parse(rule))
            await until(pilot, lambda rule=rule: dtypes.short_name(rule.partition("=")[2]) in screen(app))
        await pilot.press("c", "end", *["backspace"] * 20)
        await pilot.press(*"*=bf16:gptq", "enter")
        await until(pilot, lambda: "does not take the rounding :gptq" in screen(app))


@pytest.mark.slow
async def test_tab_in_the_cast_prompt_widens_the_pattern_and_updates_the_preview(app: DtypeApp) -> None:
    async with running(app) as pilot:
        tree_of(app).go_to("model.layers.3.mlp")
        await pilot.press("c")
        field = app.query_one("#cast-input", Input)
        assert field.value == "model.layers.3.mlp=bf16"
        await pilot.pause(0.1)
        await until(pilot, lambda: "matches 3 tensors · 73.7 k parameters · 288.00 KiB → 144.00 KiB" in screen(app))
        await pilot.press("tab")
        assert field.value == "model.layers.*.mlp=bf16"
        await pilot.pause(0.1)
        await until(pilot, lambda: "matches 18 tensors" in screen(app))
        assert tree_of(app).preview is not None
        assert "model.layers.5.mlp" in tree_of(app).preview.modules
        await pilot.press("tab")
        assert field.value == "*.mlp=bf16"
        await pilot.press("shift+tab", "shift+tab")
        assert field.value == "model.layers.3.mlp=bf16"
        for _ in "bf16":
            await pilot.press("backspace")
        await pilot.press(*"fp16", "tab", "enter")
        assert engine(app).recipes == [Recipe((Rule("model.layers.*.mlp", "float16"),))]
        assert tree_of(app).preview is None
        assert tree_of(app).has_focus


async def test_cast_prompt_explains_errors_while_typing(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("c")
        field = app.query_one("#cast-input", Input)
        for text, says in {
            "*=bf17": "did you mean bf16",
            "{a=bf16": "never closed",
            "nothing=bf16": "matches nothing",
        }.items():
            field.value = text
            await pilot.pause(0.1)
            await until(pilot, lambda says=says: says in screen(app))
        field.value = "*=bf17"
        await pilot.press("enter")
        assert engine(app).recipes == []
        await pilot.press("escape")
        assert tree_of(app).has_focus


async def test_rule_without_matches_is_not_applied(app: DtypeApp) -> None:
    """The cast prompt and the command line say why and stay open. A key on a node with nothing to cast gives a notice."""
    async with running(app) as pilot:
        await pilot.press("c")
        field = app.query_one("#cast-input", Input)
        field.value = "model.layer=bf16"
        await pilot.press("enter")
        await pilot.pause(0.1)
        await until(pilot, lambda: "matches nothing in this model; the nearest is model.layers" in screen(app))
        assert field.has_focus
        await pilot.press("escape", "colon")
        app.query_one("#command-input", Input).value = "cast *.nope bf16"
        await pilot.press("enter")
        await pilot.pause(0.1)
        await until(pilot, lambda: "matches nothing in this model" in screen(app))
        await pilot.press("escape")
        app.controller.add_rule(Rule.make("*.nowhere", "bf16"))
        await pilot.pause()
        assert "matches nothing in this model" in notices(app)[-1]
        assert engine(app).recipes == []
        assert app.controller.experiment.recipe.rules == ()


async def test_long_error_in_the_cast_prompt_is_shown_in_full(app: DtypeApp) -> None:
    async with running(app, SMALL) as pilot:
        await pilot.press("c")
        height = app.query_one("#cast").size.height
        for text, says in {
            "model.layers[0]=bf16": "the nearest is model.layers",
            "*.mlp:bf16": "write PATTERN=DTYPE, for example '*.mlp=bfloat16'",
        }.items():
            app.query_one("#cast-input", Input).value = text
            await pilot.press("enter")
            await pilot.pause()
            assert says in " ".join(screen(app).split())
            assert "cast PATTERN=DTYPE" in screen(app)
        app.query_one("#cast-input", Input).value = "*.mlp=bf16"
        await until(pilot, lambda: "matches 18 tensors" in screen(app))
        assert app.query_one("#cast").size.height == height


async def test_rule_that_changes_no_dtype_keeps_the_measured_drift(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("2")
        recipe = app.controller.experiment.recipe
        await say(app, pilot, model_ready(app), events.Measured(recipe, report(recipe)), events.Idle())
        before = app.controller.experiment.results.report
        assert before is not None
        asked = len(engine(app).recipes)
        app.controller.add_rule(Rule.make("model.layers.0.mlp", "bf16"))
        await pilot.pause()
        assert len(app.controller.experiment.recipe) == 2
        assert app.controller.experiment.results.report is before
        assert len(engine(app).recipes) == asked
        assert engine(app).commands[-1] == "follow *=bfloat16, model.layers.0.mlp=bfloat16"
        app.controller.add_rule(Rule.make("model.layers.0.mlp", "f16"))
        await pilot.pause()
        assert app.controller.experiment.results.report is None
        assert len(engine(app).recipes) == asked + 1


@pytest.mark.slow
async def test_filter_of_the_tree_shows_matches_and_their_parents(app: DtypeApp) -> None:
    async with running(app) as pilot:
        tree = tree_of(app)
        before = len(tree.rows)
        await pilot.press("slash", *"down")
        await pilot.pause()
        assert all("down" in name for name in tree.matches)
        assert len(tree.matches) == 12
        assert [row.name for row in tree.rows] == ["", "model", "model.layers", "model.layers.{0..5}"]
        assert "6 alike, 12 match" in screen(app)
        await pilot.press("enter", "n", "n")
        assert {row.name for row in tree.rows} >= {"model.layers.{0..5}", "model.layers.5.mlp.down_proj.weight"}
        assert not any("up_proj" in row.name for row in tree.rows)
        assert tree.has_focus
        first = tree.current.name
        await pilot.press("N")
        assert tree.current.name != first
        await pilot.press("escape")
        assert len(tree.rows) >= before
        await pilot.press("slash", *"q*.weight", "escape")
        assert tree.filter_text == ""


async def test_only_one_prompt_is_open_and_escape_closes_it(app: DtypeApp) -> None:
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("c")
        await pilot.click(ModuleTree)
        await pilot.press("slash")
        assert [prompt.id for prompt in app.screen.query(BottomPrompt) if prompt.is_open] == ["filter"]
        await pilot.click(ModuleTree)
        assert app.focused is tree_of(app)
        await pilot.press("escape")
        assert not [prompt.id for prompt in app.screen.query(BottomPrompt) if prompt.is_open]
        assert app.focused is tree_of(app)


async def test_results_of_another_recipe_are_never_shown(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await say(app, pilot, model_ready(app))
        await pilot.press("2")
        old, new = Recipe(), app.controller.experiment.recipe
        stale = (ModuleDrift("model.layers.0", 11.1, 9.0, 0),)
        await say(app, pilot, events.ModulesMeasured(old, stale), events.Measured(old, report(old, 7.77e-7, stale)))
        assert "7.77" not in screen(app)
        assert "11.1" not in screen(app)
        await say(app, pilot, events.Measured(new, report(new)))
        assert "6 of 6 sequences" in screen(app)
        await pilot.press("u")
        assert "6 of 6 sequences" not in screen(app), "the figures are those of the recipe before, and dim"
        assert app.controller.experiment.results.report is None


async def test_drift_of_modules_appears_during_the_measurement(app: DtypeApp) -> None:
    async with running(app) as pilot:
        recipe = app.controller.experiment.recipe
        modules = (ModuleDrift("model.layers.0", 45.6, 0.1, 0), ModuleDrift("model.layers.1", 1.0, 9.9, 4))
        await say(app, pilot, model_ready(app), events.MeasuringProgress(recipe, "candidate", 30, 60))
        await say(app, pilot, events.ModulesMeasured(recipe, modules))
        assert not missing(app, "45.6", "inf/nan", "50 %", "measuring: candidate")
        await pilot.press("w")
        assert tree_of(app).current.name == "model.layers.1"


async def test_drift_pane_has_every_figure_with_its_unit(app: DtypeApp) -> None:
    async with running(app) as pilot:
        recipe = app.controller.experiment.recipe
        await say(app, pilot, model_ready(app), events.Measured(recipe, report(recipe)), events.Idle())
        text = screen(app)
        assert not missing(
            app,
            "KL 2.50e-4 ± 1e-5 nats",
            "same top-1 98.0 %",
            "SQNR    40.00 dB",
            "cosine  0.999000",
            "KL p99     1.5e-3",
            "max |Δ| 0.5",
        )
        assert "ready" in text
        await pilot.press("enter")
        text = screen(app)
        for words in ("mean |Δ|", "2.500e-04 ± 1e-05 nats", "98.00 ± 0.40 %", "0.20 s (reference 0.10 s)"):
            assert words in text, "the details of the model have all of it"


async def test_memory_pane_shows_planned_and_measured_bytes(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("2")
        text = screen(app)
        assert "50.0 % less" in text
        reading = MemoryStats(
            resident_bytes=1 << 21, resident_by_device=(("cpu", 1 << 21),), rss_bytes=3 << 30, anonymous_bytes=1 << 30,
            mapped_bytes=2 << 30, peak_rss_bytes=4 << 30,
        )  # fmt: skip
        await say(app, pilot, events.Memory(app.controller.experiment.recipe, reading))
        assert not missing(app, "2.00 MiB cpu", "3.0 GiB, peak 4.0 GiB")
        await pilot.press("enter")
        assert not missing(app, "cpu 2.00 MiB", "1.00 GiB", "2.00 GiB of the")


async def test_recipe_pane_counts_the_tensors_of_a_node_by_the_rule_that_decides_them(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("2")
        tree_of(app).go_to("model.layers.3.mlp")
        await pilot.press("3")
        await pilot.pause()
        text = screen(app)
        assert "here: 3 tensors by rule 2 " in text
        tree_of(app).go_to("model.layers.3")
        await pilot.pause()
        await until(pilot, lambda: "here: 6 tensors by rule 1 " in screen(app) and " 3 by rule 2 " in screen(app))


async def test_tree_shows_shares_of_dtypes_in_modules_and_the_stored_dtype_of_cast_tensors(app: DtypeApp) -> None:
    async with running(app) as pilot:
        tree_of(app).go_to("model.layers.3.mlp.up_proj.weight")
        await pilot.press("2")
        text = screen(app)
        assert "f32→ bf16 " in text
        tree_of(app).go_to("model.layers.3")
        await pilot.press("2")
        (mixed,) = (line for line in lines(app) if "▾ layers" in line)
        assert re.search(r" █████[▏▎▍▌▋▊▉] f32 ", mixed), "a section for each dtype, and the name of the first"


async def test_tree_of_the_loaded_model_replaces_the_tree_of_headers(app: DtypeApp) -> None:
    async with running(app) as pilot:
        tree_of(app).go_to("model.layers.3.mlp")
        await pilot.press("2")
        live = demo_tree()
        tensors = [
            TensorInfo(t.name, t.shape, t.dtype, t.kind, ("lm_head.weight",) if "embed" in t.name else ())
            for t in live.tensors.values()
        ]
        classes = {name: "LlamaMLP" if name.endswith("mlp") else "Module" for name in live.modules}
        tree = Tree(tensors, {**classes, "lm_head": "Linear"})
        await say(app, pilot, events.ModelReady(tree, "Llama", "cpu", 1.0, "prompts", ("one weight is new",)))
        assert tree_of(app).current.name == "model.layers.3.mlp"
        assert app.controller.experiment.recipe == Recipe((Rule("model.layers.3.mlp", "bfloat16"),))
        assert "LlamaMLP" in screen(app)
        assert "one weight is new" in notices(app)
        tree_of(app).go_to("lm_head.weight")
        await pilot.pause()
        await until(pilot, lambda: "= model" in screen(app))


async def test_failed_measurement_gives_a_notice_and_marks_its_module(app: DtypeApp) -> None:
    async with running(app) as pilot:
        recipe = app.controller.experiment.recipe
        await say(
            app, pilot, model_ready(app), events.Failed(recipe, "[bold]no kernel[/]", "model.layers.1"), events.Idle()
        )
        assert screen(app).count("[bold]no kernel[/]") == 1, "an error is told once"
        assert "⚠ the run failed: the Drift pane says" in screen(app)
        assert any("failed here" in line for line in lines(app))
        await pilot.press("a")
        assert notices(app)[-1].startswith("no rules are known that make the run work")
        await pilot.press("2")
        assert not any("failed here" in line for line in lines(app))


async def test_casts_can_be_planned_from_headers_if_the_model_cannot_be_opened(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await say(app, pilot, events.OpenFailed("no config.json beside the weights"), events.Idle())
        await pilot.press("2")
        assert not missing(app, "Drift unknown: ", "50.0 % less", "planning only")


async def test_main_screen_shows_why_a_model_could_not_be_opened_and_ignores_casts() -> None:
    app = app_of(Launch("x.py:Y"))
    async with running(app) as pilot:
        assert "The tree appears" in screen(app)
        await pilot.press("2")
        assert "nothing can be cast before the model's tensors are known" in notices(app)
        await say(app, pilot, events.OpenFailed("importing it failed"), events.Idle())
        assert "importing it failed" in screen(app)
        await pilot.press("c", "2", "x", "u", "enter", "escape")
        assert not app.controller.experiment.recipe.rules


async def test_cast_of_a_float32_island_is_noted(app: DtypeApp) -> None:
    async with running(app) as pilot:
        app.controller.experiment.tree.modules["model.norm"].keep_in_fp32 = "declared"
        app.main.show_all()
        await pilot.pause()
        await until(pilot, lambda: "keep f32" in screen(app))
        await pilot.press("2")
        assert "model.norm should stay in float32" in notices(app)[-1]
        app.controller.experiment.tree.modules["model.norm"].keep_in_fp32 = None
        app.controller.experiment.tree.kept_in_fp32["model.norm.weight"] = "declared"
        await pilot.press("3")
        assert "model.norm.weight should stay in float32" in notices(app)[-1]


async def test_small_screens_show_one_pane_at_a_time(app: DtypeApp) -> None:
    async with running(app, SMALL) as pilot:
        assert [app.query_one(pane).display for pane in (DriftPane, MemoryPane, RecipePane)] == [True, False, False]
        await pilot.press("tab")
        assert [app.query_one(pane).display for pane in (DriftPane, MemoryPane, RecipePane)] == [False, True, False]
        assert "planned" in screen(app)
        await pilot.resize_terminal(*WIDE)
        await pilot.pause()
        assert all(app.query_one(pane).display for pane in (DriftPane, MemoryPane, RecipePane))


async def test_app_says_which_size_it_needs_in_a_too_small_terminal(app: DtypeApp) -> None:
    async with running(app, (40, 10)) as pilot:
        await until(pilot, lambda: "needs 60 x 15" in " ".join(screen(app).split()))
        await pilot.resize_terminal(*SMALL)
        await pilot.pause()
        await until(pilot, lambda: "embed_tokens" in screen(app))
        assert "needs 60" not in screen(app)


async def test_enter_shows_the_details_of_a_tensor(app: DtypeApp) -> None:
    async with running(app) as pilot:
        tree_of(app).go_to("model.embed_tokens.weight")
        await pilot.press("2", "enter")
        await pilot.pause()
        assert not missing(app, "1024 × 96", "float32, 384.00 KiB", "bfloat16, 192.00 KiB", "rule 1", "decides")


@pytest.mark.slow
async def test_command_palette_offers_and_runs_actions(app: DtypeApp) -> None:
    async with running(app) as pilot:
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Undo", "Cast by pattern", "Measure again", "Cast the node to bfloat16"} <= titles
        await pilot.press("ctrl+p")
        await pilot.press(*"cast the node to bfl")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await pilot.pause(0.2)
        assert engine(app).recipes == [Recipe((Rule("*", "bfloat16"),))]


async def test_esc_cancels_a_measurement_and_m_measures_again(app: DtypeApp) -> None:
    async with running(app) as pilot:
        recipe = app.controller.experiment.recipe
        await say(app, pilot, model_ready(app), events.MeasuringProgress(recipe, "candidate", 1, 60))
        await pilot.press("escape")
        assert engine(app).commands == ["start", "cancel"]
        await say(app, pilot, events.Stopped(recipe, "measure"), events.Idle())
        await pilot.press("m")
        assert engine(app).commands[-1] == "measure"


async def test_quitting_during_the_first_paint_raises_no_error() -> None:
    app = make_app()
    async with app.run_test():
        app.exit()
    app.main._is_complete = False  # as when q was faster than what follows the first paint
    await app._begin()
    assert not app.main._is_complete


async def test_tree_keys_work_before_the_panes_are_mounted() -> None:
    app = make_app()
    may_end = asyncio.Event()
    seen = []

    async def slowly() -> None:
        await may_end.wait()
        await MainScreen.complete(app.main)

    app.main.complete = slowly  # type: ignore[method-assign]
    async with app.run_test(size=(120, 36)) as pilot:
        for key in ("down", "end", "tab"):
            app.post_message(Key(key, None))
            await asyncio.sleep(0.1)
            seen.append((app.main.cursor, app.main._is_complete))
        may_end.set()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert seen == [("model", False), ("model.norm", False), ("model.norm", False)]
        assert app.focused is app.main.side.panes[0]
        assert engine(app).commands == ["start"]


@pytest.mark.parametrize("told", [True, False], ids=["told to", "closed"])
async def test_quitting_while_panes_are_imported_raises_no_error(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the app is told to exit, or Textual removes the widgets of the screen without telling the app."""
    app = make_app()
    sleep = asyncio.sleep

    async def leaving(seconds: float) -> None:
        if seconds == PAUSE_S and not app.main._has_panes:
            if told:
                app.exit()
            else:
                await app.main.remove_children()
        else:
            await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", leaving)
    async with app.run_test():
        await sleep(0.2)
    assert app.main.side.panes
    assert not app.main._has_panes


async def test_key_pressed_during_the_start_closes_the_offer_of_the_tour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtype_tui.app.PAUSE_S", 0.4)
    app = make_app(offers_tour=True)
    async with app.run_test(size=(120, 36)) as pilot:
        app.post_message(Key("escape", "\x1b"))
        await until(pilot, lambda: len(engine(app).commands) > 0)
        assert "tour" not in screen(app)
        assert engine(app).commands == ["start"]


async def test_quitting_closes_the_engine(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("q")
    assert engine(app).commands[-1] == "close"


async def test_quitting_with_unsaved_rules_must_be_confirmed_once(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await say(app, pilot, model_ready(app), events.Idle())
        await pilot.press("2", "q")
        assert not app._exit
        assert notices(app)[-1] == "1 rule would be lost: e saves the recipe, and q again quits without it"
        await pilot.press("3", "q")
        assert not app._exit, "these are other rules than those of the warning"
        app.controller.save(RecipeRequest(Path("rules.yaml")))
        assert app.controller.unsaved_rules == 0
        await say(app, pilot, events.Saved(app.controller.experiment.recipe, False, "the disk is full"))
        assert app.controller.unsaved_rules == 1
        await pilot.press("q")
        assert not app._exit
        await pilot.press("q")
        assert app._exit


async def test_control_characters_in_tensor_names_are_escaped_on_the_screen() -> None:
    evil = "a\x1b]0;owned\x07\n[bold red]\u202egnp.\x9b" + "x" * 5000
    app = make_app(
        Tree([TensorInfo(f"{evil}.weight", (2, 2), "float32"), TensorInfo("ok.weight", (2,), "float32")]), title=evil
    )
    async with running(app) as pilot:
        await pilot.press("j", "l", "j", "2", "enter")
        await pilot.pause()
        text = screen(app)
        assert "[bold red]" in text, "markup is text"
        assert all(character.isprintable() for character in text.replace("\n", ""))
        assert all(len(line) <= WIDE[0] for line in lines(app))


@pytest.mark.slow
async def test_tree_of_90000_tensors_opens_filters_and_casts() -> None:
    parts = itertools.product(range(60), range(250), ("up", "gate", "down"))
    names = [f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for layer, expert, part in parts]
    names += [f"model.layers.{layer}.norm.weight" for layer in range(60)]
    async with launched(Tree(TensorInfo(name, (4, 4), "bfloat16") for name in names)) as (app, pilot):
        tree = tree_of(app)
        assert len(tree.rows) < 100
        await pilot.press("slash", *"experts.249.up")
        await pilot.pause()
        assert len(tree.matches) == 120
        await pilot.press("enter", "escape")
        tree.go_to("model.layers.7.mlp.experts")
        await pilot.press("3")
        assert app.controller.experiment.plan.planned_bytes == app.controller.experiment.plan.stored_bytes
        assert len(app.controller.experiment.plan.selections[0]) == 750


def test_every_binding_has_its_action() -> None:
    for owner in (MainScreen, DtypeApp, ModuleTree, CastPrompt, FilterPrompt, SettingsScreen):
        for binding in owner.BINDINGS:
            assert isinstance(binding, Binding)
            name = binding.action.partition("(")[0]
            holder, _, name = name.rpartition(".")
            assert hasattr({"app": DtypeApp, "screen": MainScreen}.get(holder, owner), f"action_{name}"), binding


async def test_key_f_opens_a_window_with_implicit_casts(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("f")
        assert engine(app).commands[-1] == "flow"
        cast = ImplicitCastStats("model.layers.1.mlp.up_proj", "linear", "float32", "float64", 12288, 1, True)
        recipe = app.controller.experiment.recipe
        await say(app, pilot, model_ready(app), events.JobDone(recipe, FLOW.ask(None), (cast,)))
        assert not missing(app, "model.layers.1.mlp.up_proj", "linear", "f32 → f64", "12.3 k", "raises")
        await pilot.press("escape")
        await say(app, pilot, events.JobDone(Recipe((Rule("*", "float64"),)), FLOW.ask(None), (cast,)))
        assert not isinstance(app.screen, Overlay), "that was another recipe's"


def generation(reference: str, candidate: str, same: int) -> Generation:
    pieces = [tuple(text) for text in (reference, candidate)]
    assert pieces[0][:same] == pieces[1][:same]
    return Generation("import os\n", *(Written(tuple(map(ord, text)), text, 0.5) for text in pieces))


@pytest.mark.parametrize("size", [WIDE, pytest.param(SMALL, marks=pytest.mark.slow)])
async def test_generated_texts_are_side_by_side_with_the_difference_marked(
    app: DtypeApp, size: tuple[int, int]
) -> None:
    async with running(app, size) as pilot:
        await pilot.press("g", "f2")
        assert "generate" not in " ".join(engine(app).commands), "the first time it asks for a prompt and a length"
        await pilot.press(*"def", "tab", "backspace", "backspace", "enter")
        await pilot.pause()
        assert "Give a length" in screen(app)
        await pilot.press(*"24", "enter")
        assert engine(app).commands[-1] == "generate 24 def"
        recipe = app.controller.experiment.recipe
        whole = generation("def run\x1b[2J", "def rat\x1b[2J", 5)
        part = dataclasses.replace(whole, candidate=Written((), (), 0.0), finished=False)
        await say(app, pilot, model_ready(app), events.JobGrown(recipe, GENERATE.ask(GenerateText(24)), part))
        await until(pilot, lambda: "generating: reference" in screen(app))
        assert "⟦" not in screen(app)
        part = dataclasses.replace(whole, candidate=Written((*map(ord, "def ra"),), (*"def ra",), 0.1), finished=False)
        await say(app, pilot, events.JobGrown(recipe, GENERATE.ask(GenerateText(24)), part))
        await until(pilot, lambda: "def r⟦a⟧" in screen(app))  # the first difference is marked as it comes
        await say(app, pilot, events.JobDone(recipe, GENERATE.ask(GenerateText(24)), (whole,)))
        await until(pilot, lambda: "22/s" in screen(app))
        text = screen(app)
        assert not missing(
            app, "reference", "candidate", "def r⟦u⟧n", "def r⟦a⟧t", "the first 5 tokens are the same", "22/s"
        )
        assert "\x1b[2J" not in text
        await pilot.press("escape")
        assert not isinstance(app.screen, GenerationScreen)
        asked = len(engine(app).commands)
        await say(app, pilot, events.Idle())
        await pilot.press("g")
        await pilot.pause()
        assert "def r⟦a⟧t" in screen(app)
        assert len(engine(app).commands) == asked, "texts are kept while the recipe is the same"
        await pilot.press("escape")
        await say(app, pilot, inputs(app), events.Idle())
        await pilot.press("g")
        assert len(engine(app).commands) == asked + 1, "generated again with other inputs"
        await pilot.press("escape", "2", "g")
        assert engine(app).commands[-1] == "generate 24 def", "and with another recipe"
        await pilot.press("escape")
        assert engine(app).commands[-1] == "cancel generate"


async def test_answer_to_a_check_opens_a_window_with_the_findings(app: DtypeApp) -> None:
    async with running(app, SMALL) as pilot:
        app.main.action_ask("check")
        await pilot.pause()
        assert engine(app).commands[-1] == "check"
        finding = Finding(
            "missing-part", "model.layers.0.mlp.up_proj.weight", "holds codes and has no scale", "m.safetensors"
        )
        report = CheckReport("demo", 56, 1, 3, None, 0.1, (finding,), ("values",), coverage=Coverage(56))
        recipe = app.controller.experiment.recipe
        await say(app, pilot, model_ready(app), events.JobDone(recipe, CHECK.ask(None), report))
        assert not missing(
            app, "1 finding.", "56 of 56 tensors found", "holds codes and has no scale", "unslothai/unsloth#6200"
        )
        await pilot.press("escape")
        await say(app, pilot, events.JobDone(recipe, CHECK.ask(None), dataclasses.replace(report, findings=())))
        assert "No problems were found." in screen(app)


async def test_key_t_opens_a_window_with_measured_speed(app: DtypeApp) -> None:
    async with running(app, SMALL) as pilot:
        await pilot.press("t")
        assert engine(app).commands[-1] == "speed"
        rows = (
            SpeedRow("reference", "f32", 0.5, 0.4, 0.6, 5, 2000.0, False),
            SpeedRow("candidate", "f32 + bf16", 2.0, 1.9, 2.1, 5, 500.0, True),
        )
        report = SpeedReport("demo", "cpu", 2, (), "6 default prompts", rows)
        recipe = app.controller.experiment.recipe
        await say(app, pilot, model_ready(app), events.JobDone(recipe, SPEED.ask(None), report))
        assert not missing(
            app,
            "500.0 ms",
            "400.0 ms to 600.0 ms",
            "2,000",
            "0.25 x",
            "This mix does not run in plain torch",
            "2 threads",
        )


async def test_keys_for_jobs_send_nothing_if_the_model_cannot_run(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await say(app, pilot, msgspec.structs.replace(model_ready(app), no_forward="no architecture"))
        await pilot.press("g", "t", "f")
        assert engine(app).commands == ["start"]


async def test_requests_to_a_busy_engine_are_listed_as_next(app: DtypeApp) -> None:
    async with running(app) as pilot:
        recipe = app.controller.experiment.recipe
        await say(app, pilot, model_ready(app), events.MeasuringProgress(recipe, "candidate", 1, 10))
        await pilot.press("t")
        assert re.search(r"● measuring: candidate  10 % .*  next: timing ", screen(app))
        assert lines(app)[-1].startswith(" Esc stop  ")
        assert notices(app) == []
        await say(app, pilot, events.Jobs("measure", ("speed", "scan")))
        assert not missing(app, "  next: timing, scan ", " Esc stop  J stop a job ")


@pytest.mark.slow
async def test_settings_chosen_by_keys_are_applied_and_measured(app: DtypeApp) -> None:
    async with running(app, SMALL) as pilot:
        recipe = app.controller.experiment.recipe
        await say(app, pilot, model_ready(app), events.Measured(recipe, report(recipe)))
        await pilot.press("comma", "right", "down", "right")
        await pilot.pause()
        await until(pilot, lambda: "[bf16]" in screen(app))
        assert "[follow the model]" in screen(app)
        await pilot.press("enter")
        await pilot.pause()
        chosen = RunSettings(autocast="bfloat16", float_inputs="model")
        assert engine(app).settings == [chosen]
        assert app.controller.experiment.results.report is None
        await say(app, pilot, events.Measured(recipe, report(recipe)))
        assert app.controller.experiment.results.report is None, "that was measured under other settings"
        await say(app, pilot, events.Measured(recipe, report(recipe, settings=str(chosen)), chosen))
        assert app.controller.experiment.results.report is not None
        assert "autocast bfloat16" in screen(app)
        await pilot.press("comma", "right", "escape")
        assert engine(app).settings == [chosen], "Esc leaves everything as it was"


async def test_first_shard_of_a_large_checkpoint_is_shown_before_all_headers_are_read() -> None:
    first = Tree([TensorInfo("model.layers.0.weight", (4, 4), "bfloat16")])
    whole = Tree([TensorInfo(f"model.layers.{number}.weight", (4, 4), "bfloat16") for number in range(3)])
    async with launched(first, "giant", partial=True) as (app, pilot):
        assert "layers" in screen(app)
        assert "stored  32 B" not in screen(app), "sums of a part are not those of the model"
        await say(app, pilot, events.HeadersRead(whole, ("a notice",)))
        assert "96 B" in screen(app)
        assert notices(app) == ["a notice"]
        reason = "giant: no forward pass: the weights take 626.92 GiB"
        await say(app, pilot, events.OpenFailed(reason), events.Idle())
        assert "no live model: planning only" in screen(app)
        assert "626.92 GiB" in " ".join(screen(app).split())
        await pilot.press("1")
        assert app.controller.experiment.plan.planned_bytes == 192


@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_key_v_opens_a_window_with_the_values_of_a_tensor(app: DtypeApp, size: tuple[int, int]) -> None:
    async with running(app, size) as pilot:
        await pilot.press("v")
        assert notices(app) == ["only tensors have values: go to one"]
        tree_of(app).go_to("model.embed_tokens.weight")
        await pilot.press("v")
        assert engine(app).commands[-1] == "look at model.embed_tokens.weight"
        lost = WeightError("w", "float32", "float16", 1000, 1e-5, 2e-4, 1e-3, 60.0, 3, 0, 20, 500, 0)
        histogram = ExponentHistogram("w", ((-30, 20), (-10, 900), (20, 3)), 7, 0)
        reading = WeightStats(histogram, (lost,))
        ask, recipe = VALUES.ask(InspectTensor("model.embed_tokens.weight", ())), app.controller.experiment.recipe
        await say(app, pilot, events.JobDone(recipe, ask, reading))
        assert not missing(app, "60.00 dB", "20 2.0 %", "500 50.0 %")
        assert all(len(line.rstrip()) <= size[0] for line in lines(app))


@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_key_r_in_the_window_of_values_shows_what_a_rounding_gains(app: DtypeApp, size: tuple[int, int]) -> None:
    name, formats = "model.layers.0.mlp.up_proj.weight", ("nvfp4:imatrix", "int4@g32:imatrix", "bfloat16")
    targets = cast_to(formats[1])
    assert {*formats} < {*targets}, "the rounding of the rule, also for other formats"
    errors = tuple(
        WeightError(name, "float32", dtypes.unrounded(dtype), 1000, 1e-5, 2e-4, 1e-3, 60.0, 0, 0, 20, 500, 0)
        for dtype in formats
    )
    reading = WeightStats(ExponentHistogram(name, ((-10, 900),), 0, 0), errors)
    gains = (WeightGain(name, formats[0], 3.2), WeightGain(name, formats[1], math.inf))
    async with running(app, size) as pilot:
        recipe, ask = app.controller.experiment.recipe, InspectTensor(name, targets)
        await say(app, pilot, events.JobDone(recipe, VALUES.ask(ask), reading), events.Idle())
        assert "less error" not in screen(app)
        await pilot.press("r")
        assert len(app.screen_stack) == 1
        assert engine(app).commands[-1] == f"look at {name} with gains"
        again = VALUES.ask(msgspec.structs.replace(ask, with_gains=True))
        await say(app, pilot, events.JobDone(recipe, again, dataclasses.replace(reading, gains=gains)))
        assert not missing(app, "rounding", "3.20x less error", "no error", "20 2.0 %", "layer's output with imatrix")
        assert all(len(line.rstrip()) <= size[0] for line in lines(app))
        await pilot.press("escape")
        unused = dataclasses.replace(reading, gains=(WeightGain(name, formats[0], None),))
        await say(app, pilot, events.JobDone(recipe, again, unused))
        assert not missing(app, "No matrix product uses this tensor, so no rounding changes it.")


def test_exponent_histogram_counts_every_value() -> None:
    for counts in (((-30, 20), (-10, 900), (20, 3)), ((0, 96),), ((-3, 1), (-2, 2), (-1, 3))):
        reading = WeightStats(ExponentHistogram("w", counts, 0, 0), ())
        rows = [line.split() for line in exponent_histogram(reading).plain.splitlines() if line.startswith("2^")]
        shown = [int(row[1]) for row in rows if row[1] != "-"]
        assert sorted(shown) == sorted(count for _, count in counts)
        assert len(rows) <= 26


def test_exponent_histogram_marks_normal_subnormal_zero_and_overflow() -> None:
    half = dtypes.BY_NAME["float16"]
    marks = {first: range_mark(first, 1, half) for first in (16, 15, -14, -15, -24, -25, -26)}
    assert marks == {16: "∞", 15: "|", -14: "|", -15: ":", -24: ":", -25: ":", -26: "0"}


async def test_drift_pane_says_that_a_measurement_was_stopped(app: DtypeApp) -> None:
    async with running(app) as pilot:
        recipe = app.controller.experiment.recipe
        drifts = (ModuleDrift("model.layers.1.mlp", 30.0, 0.1, 0),)
        await say(app, pilot, model_ready(app), events.ModulesMeasured(recipe, drifts))
        await say(app, pilot, events.Stopped(recipe, "measure"), events.Idle())
        assert not missing(app, "Stopped before the end: press m.", "worst 30.00")


async def test_key_g_says_why_a_model_cannot_generate() -> None:
    async with launched() as (app, pilot):
        why = "a Net does not generate text; open a model with a language model head or a captioner"
        tree = app.controller.experiment.tree
        await say(app, pilot, events.ModelReady(tree, "Net", "cpu", 1.0, "prompts", (), None, why), events.Idle())
        await pilot.press("g")
        assert notices(app) == [why]
        assert len(app.screen_stack) == 1


async def test_message_that_a_job_does_not_stop_disappears_when_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_life, "STOP_WAIT_S", 0.0)
    async with launched(size=(80, 24)) as (app, pilot):
        recipe = app.controller.experiment.recipe
        await say(app, pilot, model_ready(app), events.Jobs("measure", ()))
        await say(app, pilot, events.MeasuringProgress(recipe, "candidate", 1, 4))
        app.controller.life.stop()
        app.controller.life.check_stopped()
        await pilot.pause()
        assert "has not stopped" in screen(app)
        await say(app, pilot, events.Idle())
        assert "has not stopped" not in screen(app)


@pytest.mark.parametrize("key", ["1", "8"])
async def test_cast_to_the_present_dtype_adds_no_rule(key: str) -> None:
    async with launched() as (app, pilot):
        tree_of(app).go_to("model.layers.3.mlp")
        await pilot.press(key)
        words = {"1": "float32", "8": "as stored"}[key]
        assert notices(app) == [f"model.layers.3.mlp is {words} already"]
        assert app.controller.experiment.recipe == Recipe()
        await pilot.press("2", "home", "2", "down", "2")
        assert [str(rule) for rule in app.controller.experiment.recipe.rules] == [
            "model.layers.3.mlp=bfloat16",
            "*=bfloat16",
        ]
        assert notices(app)[-1] == "model is bfloat16 already"


@pytest.mark.parametrize("keys", [("c",), ("colon", *"cast * bf16")], ids=["prompt", "command line"])
async def test_preview_of_a_rule_is_updated_when_the_tree_of_the_model_arrives(keys: tuple[str, ...]) -> None:
    """The tree from the headers has fewer modules than the tree of the model, which arrives during typing."""
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press(*keys)
        await until(pilot, lambda: app.main.tree_view.preview is not None)
        old = app.controller.experiment.tree
        new = Tree((*old.order, TensorInfo("model.rotary_emb.inv_freq", (8,), "float32", "non-persistent buffer")))
        await say(app, pilot, events.ModelReady(new, "LlamaForCausalLM", "cpu", 1.0, "prompts", ()))
        await until(pilot, lambda: app.main.tree_view.preview is not None)
        assert "matches 56 tensors" in screen(app)
        app.main.tree_view.show_preview(preview(old, make_plan(old, Recipe()), Rule("*", "bfloat16")))
        assert app.main.tree_view.preview is None
