"""Presets, leaving with something, and the session that is kept, in the app."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest
from tests.helpers.recording_engine import (
    RecordingEngine,
    demo_tree,
    engine,
    launched,
    make_app,
    model_ready,
    report,
    running,
    say,
)
from tests.helpers.screen_text import missing, notices, screen, until
from textual.pilot import Pilot
from textual.widgets import Input

from dtype_engine import Options, Recipe, Rule, RunSettings
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.presets import PRESETS, preset, preset_effects
from dtype_engine.service import events
from dtype_engine.service.save_requests import (
    ConvertRequest,
    ExportPlan,
    ExportRequest,
    RecipeRequest,
    ReportRequest,
)
from dtype_tui.app import DtypeApp
from dtype_tui.cli.resume import with_saved_options
from dtype_tui.screens.presets import PresetsScreen
from dtype_tui.screens.save import KINDS, LAYOUTS, SaveScreen
from dtype_tui.state.results import Results
from dtype_tui.state.session_saver import SessionSaver
from dtype_tui.state.session_store import SavedSession, newest_session, read_session, sessions_folder
from dtype_tui.widgets.module_tree import ModuleTree

SIZES = [(120, 36), (80, 24)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written beside nobody's, and sessions kept where no other test looks."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def app() -> DtypeApp:
    tree = demo_tree()
    return make_app(Tree(tree.tensors.values(), {name: "Linear" if "proj" in name else "M" for name in tree.modules}))


@pytest.mark.parametrize("size", SIZES)
async def test_presets_window_shows_the_effect_of_each_preset_and_enter_applies_one(
    app: DtypeApp, size: tuple[int, int]
) -> None:
    async with running(app, size) as pilot:
        await pilot.press("2")
        before = app.controller.experiment.recipe
        await pilot.press("p")
        await until(
            pilot, lambda: "modelopt" in screen(app) and "…\n" not in screen(app) and "50.0 % less" in screen(app)
        )
        await until(pilot, lambda: len(app.screen.effects) == len(PRESETS))  # type: ignore[attr-defined]
        await pilot.press("down", "down")
        text = screen(app)
        made = PRESETS["fp8-linears"].recipe(app.controller.experiment.tree)
        plan = make_plan(app.controller.experiment.tree, made)
        changed = sum(plan.dtypes[n] != t.dtype for n, t in app.controller.experiment.tree.tensors.items())
        (line,) = [line for line in text.splitlines() if "fp8-linears" in line]
        assert f"Changes {changed} tensors." in " ".join(text.replace("│", "").split())
        assert f"{human_bytes(plan.planned_bytes)} " in line
        assert "Stored: 2.70 MiB." in text
        assert f"{100 * (1 - plan.planned_bytes / plan.stored_bytes):.1f} % less" in line
        assert "type:Linear → fp8" in text
        await pilot.press("enter")
        assert app.controller.experiment.recipe == made
        assert engine(app).recipes[-1] == made
        await pilot.press("u")
        assert app.controller.experiment.recipe == before


async def test_presets_window_applies_a_preset_with_a_rounding(app: DtypeApp) -> None:
    async with running(app, (80, 24)) as pilot:
        await pilot.press("p")
        await until(pilot, lambda: len(app.screen.effects) == len(PRESETS))  # type: ignore[attr-defined]
        await pilot.press(*["down"] * list(PRESETS).index("nvfp4"), "left")
        text = " ".join(screen(app).replace("│", "").split())
        assert "nvfp4:gptq" in text
        assert "all-bf16:gptq" not in text
        assert "Rounded by gptq: each channel's error" in text
        await pilot.press("enter")
        assert app.controller.experiment.recipe == preset("nvfp4:gptq").recipe(app.controller.experiment.tree)


async def test_presets_window_says_which_presets_fit_in_memory(app: DtypeApp) -> None:
    stored = app.controller.experiment.tree.stored_bytes

    async def words(pilot: Pilot[None]) -> str:
        """Return the window's text when everything in it is known, and close it."""
        await pilot.press("p")
        await until(pilot, lambda: len(app.screen.effects) == len(PRESETS))  # type: ignore[attr-defined]
        await pilot.pause()
        text = screen(app)
        await pilot.press("escape")
        return text

    async with running(app, (80, 24)) as pilot:
        assert "fit" not in await words(pilot), "the memory is unknown until the engine has said it"
        await say(app, pilot, events.OpenFailed("no weights", memory_bytes=stored // 2 - 1))
        text = await words(pilot)
        assert re.search(r"all-bf16 .* 50.0 % less  does not fit", text)
        assert re.search(r"fp8-linears .* less  fits", text)
        app.controller.set_budget(stored)
        text = await words(pilot)
        assert re.search(r"all-bf16 .* less  fits", text)
        assert "Weights, KV cache and activations at" in text


async def test_preset_without_effect_is_not_applied_and_says_why(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("p", *["down"] * list(PRESETS).index("islands-fp32"))
        await until(pilot, lambda: len(app.screen.effects) == len(PRESETS))  # type: ignore[attr-defined]
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, PresetsScreen)
        assert "declares no islands" in notices(app)[0]
        await pilot.press("escape")
        assert app.controller.experiment.recipe == Recipe()


def test_effects_shown_for_presets_equal_those_of_the_plans_they_make() -> None:
    tree = demo_tree()
    found = list(preset_effects(tree))
    assert [outcome.preset.name for outcome in found] == list(PRESETS)
    assert (found[0].tensors, found[0].stored_bytes, found[0].planned_bytes) == (56, 2831232, 2831232 // 2)
    assert "module classes" in found[1].reason


@pytest.mark.parametrize("name", ["fp8-linears", "w4a16:gptq"])
async def test_preset_of_the_command_line_is_applied_when_classes_are_known(name: str) -> None:
    bare = demo_tree()
    casts = Recipe((Rule("lm_head", "float32"),))
    async with launched(bare, recipe=casts, preset=name) as (app, pilot):
        assert app.controller.experiment.recipe == casts
        tree = Tree(bare.tensors.values(), {name: "Linear" if "proj" in name else "M" for name in bare.modules})
        await say(app, pilot, events.ModelReady(tree, "Llama", "cpu", 1.0, "prompts", ()))
        made = preset(name).recipe(tree)
        assert app.controller.experiment.recipe.rules == (*made.rules, *casts.rules)
        assert engine(app).recipes[-1] == app.controller.experiment.recipe
    app = make_app(bare, preset="all-bf16")
    assert app.controller.experiment.recipe == PRESETS["all-bf16"].recipe(bare)


def planned(app: DtypeApp) -> events.ExportPlanned:
    plan = ExportPlan(
        967_380, 2, (("bfloat16", 43, 528_384), ("float8_e4m3fn", 13, 438_996)), "It loads so.", ("one note",)
    )
    return events.ExportPlanned(app.controller.experiment.recipe, plan)


@pytest.mark.parametrize("size", SIZES)
async def test_save_screen_says_what_will_be_written(app: DtypeApp, size: tuple[int, int]) -> None:
    async with running(app, size) as pilot:
        await pilot.press("2", "e")
        await pilot.pause()
        assert engine(app).commands[-1] == "plan export"
        await say(app, pilot, planned(app), events.Idle())
        assert not missing(
            app,
            "944.71 KiB in 2 files, 56 tensors",
            "bf16 516.00 KiB",
            "fp8 428.71 KiB",
            "It loads so.",
            "one note",
        )
        assert app.screen.query_one(Input).value == "demo-cast"
        await pilot.press("enter")
        assert engine(app).saves == [ExportRequest(Path("demo-cast"))]
        assert "writing" in screen(app)
        await say(app, pilot, events.SavingProgress(Recipe(), "exporting: 310.00 MiB/s", 30, 100))
        await until(pilot, lambda: "exporting: 310.00 MiB/s  30 %" in screen(app))
        await pilot.press("escape")
        assert engine(app).commands[-1] == "cancel"
        await pilot.press("q")
        await pilot.pause()
        assert app.is_running
        assert "Esc stops it" in notices(app)[-1]
        await say(app, pilot, events.Saved(Recipe(), False, "stopped: nothing was written"), events.Idle())
        assert notices(app)[-1] == "stopped: nothing was written"
        assert app.controller.experiment.results.failure is None
        assert "ready" in screen(app)


async def test_save_screen_waits_for_the_model_only_while_it_opens(app: DtypeApp) -> None:
    async with running(app, (120, 36)) as pilot:
        await pilot.press("e")
        await until(pilot, lambda: "appears when the model is loaded" in screen(app))
        app.controller.experiment.push(Recipe((Rule("*", "bfloat16"),)))  # by a preset that needs the classes
        await say(app, pilot, model_ready(app))
        await until(pilot, lambda: "Working out what will be written" in screen(app))
        assert "when the model is loaded" not in screen(app)
        assert engine(app).commands.count("plan export") == 2, "the engine was asked about another recipe"
        await say(app, pilot, planned(app))
        await until(pilot, lambda: "944.71 KiB in 2 files" in screen(app))


async def test_save_screen_says_why_one_file_cannot_hold_the_export(app: DtypeApp) -> None:
    async with running(app, (120, 36)) as pilot:
        await pilot.press("2", "e")
        why = "13 weights (first a, float8_e4m3fn) have scales, which need a config.json"
        refused = msgspec.structs.replace(planned(app).plan, no_one_file=why)
        await say(app, pilot, events.ExportPlanned(app.controller.experiment.recipe, refused))
        await until(pilot, lambda: "It loads so." in screen(app))
        await pilot.press("ctrl+u", *"net.pth")
        await until(pilot, lambda: f"One file of weights can't hold this: {why[:30]}" in screen(app))
        assert "torch.load" not in screen(app)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
async def test_save_screen_says_which_programs_load_the_checkpoint_and_why_others_do_not(
    app: DtypeApp, size: tuple[int, int]
) -> None:
    async with running(app, size) as pilot:
        await say(app, pilot, msgspec.structs.replace(model_ready(app), loader="transformers"))
        app.controller.apply_recipe(Recipe((Rule("*.q_proj", "float8_e4m3fn"), Rule("*.k_proj", "float8_e4m3fn"))))
        await pilot.press("e")
        await say(app, pilot, planned(app), events.Idle())
        await until(pilot, lambda: "loads in: transformers ✓" in screen(app), 20)
        assert "SGLang ✗ (q, k, v differ)" in screen(app)
        if size[1] == 24:  # the reasons come last, below the window's edge
            return
        words = " ".join(screen(app).replace("│", " ").split())
        assert "vLLM, SGLang: fused into one layer, and in several formats: q_proj fp8, k_proj fp8, v_proj f32" in words


@pytest.mark.slow
async def test_save_screen_says_what_loads_an_export_to_one_file(app: DtypeApp) -> None:
    async with running(app, (120, 36)) as pilot:
        await pilot.press("2", "e")
        await say(app, pilot, planned(app))
        await until(pilot, lambda: "It loads so." in screen(app))
        for name, reader in (("net.pth", "torch.load"), ("net.safetensors", "safetensors.torch.load_file")):
            await pilot.press("ctrl+u", *name)
            await until(pilot, lambda reader=reader: f"Weights alone: {reader} reads them" in screen(app))  # type: ignore[misc]
            assert "It loads so." not in screen(app)
        await pilot.press("ctrl+u", *"net")
        await until(pilot, lambda: "It loads so." in screen(app))


async def test_save_screen_says_why_an_export_is_refused(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("e")
        await say(app, pilot, events.ExportPlanned(Recipe(), None, "packed of several tensors"))
        await until(pilot, lambda: "packed of several tensors" in screen(app))
        await pilot.press("escape")
        await pilot.pause()
        assert engine(app).saves == []


@pytest.mark.slow
async def test_save_screen_saves_every_kind_of_file_and_asks_before_replacing_a_file(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("2")
        measured = report(app.controller.experiment.recipe)
        app.controller.experiment.results = Results(report=measured)
        for place, (kind, _) in enumerate(KINDS):
            await pilot.press("e", *["down"] * place)
            await pilot.press("enter")
            request = engine(app).saves[-1]
            if kind in ("recipe", "report"):
                assert isinstance(request, RecipeRequest | ReportRequest)
                assert request.drift is measured
            elif kind in LAYOUTS:
                assert request == ExportRequest(
                    Path("demo-cast" if kind == "checkpoint" else "demo-gptq"), layout=LAYOUTS[kind]
                )
            else:
                assert isinstance(request, ConvertRequest)
                assert (request.target, request.file.name.startswith(f"demo.{kind}.")) == (kind, True)
        Path("demo.recipe.yaml").write_text("mine")
        await pilot.press("e", "down")
        field = app.screen.query_one(Input)
        assert field.value == "demo-2.recipe.yaml"
        field.value = "demo.recipe.yaml"
        await pilot.press("enter")
        assert isinstance(app.screen, SaveScreen)
        assert "already exists: Enter again replaces it" in screen(app)
        await pilot.press("end", "x")
        await pilot.pause()
        assert "Enter again" not in screen(app)
        await pilot.press("backspace", "enter", "enter")
        assert engine(app).saves[-1] == RecipeRequest(Path("demo.recipe.yaml"), True, measured)


async def test_save_screen_asks_a_remote_engine_about_existing_files(
    app: DtypeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordingEngine, "host", "box")
    async with running(app) as pilot:
        await pilot.press("e")
        app.screen.query_one(Input).value = "~/out"
        await pilot.press("enter")
        assert engine(app).commands[-1] == "check ~/out for an export"
        assert "checking whether ~/out exists on box" in screen(app)
        await say(app, pilot, events.PathChecked("~/other", True))
        assert "checking" in screen(app), "that is about another path"
        await say(app, pilot, events.PathChecked("~/out", False, "can't write ~/out: Permission denied"))
        assert notices(app)[-1] == "can't write ~/out: Permission denied"
        await pilot.press("enter")
        await say(app, pilot, events.PathChecked("~/out", True))
        assert "~/out already exists: Enter again replaces it" in screen(app)
        assert engine(app).saves == []
        await pilot.press("enter")
        await say(app, pilot, events.PathChecked("~/out", True))
        assert engine(app).saves == [ExportRequest(Path("~/out"), True)], "the home is that of the other machine"
        await pilot.press("e")
        app.screen.query_one(Input).value = "new"
        await pilot.press("enter")
        await say(app, pilot, events.PathChecked("new", False))
        assert engine(app).saves[-1] == ExportRequest(Path("new"))


@pytest.mark.slow
async def test_save_screen_refuses_invalid_targets(tmp_path: Path) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    async with launched(path=tmp_path / "model") as (app, pilot):
        await pilot.press("e")
        for path, says in (
            ("../model", "holds the model that is to be exported"),
            ("../other", "has no recipe.yaml of an export, so it is no export and is not replaced"),
            ("../link", "is a link to the folder"),
            ("nowhere/out", "there is no folder"),
        ):
            await pilot.press("ctrl+u", *path, "enter")
            await pilot.pause()
            assert says in notices(app)[-1]
            assert isinstance(app.screen, SaveScreen), path
            assert "Enter again" not in screen(app), path
        await pilot.press("down", *"nowhere/file", "enter")
        assert "nowhere to write file to" in notices(app)[-1]
        assert isinstance(app.screen, SaveScreen)
        assert engine(app).saves == []


async def test_file_name_suggested_for_saving_is_numbered_if_taken(app: DtypeApp) -> None:
    Path("demo-cast").mkdir()
    Path("demo-report.html").touch()
    async with running(app) as pilot:
        await pilot.press("e")
        assert app.screen.query_one(Input).value == "demo-cast-2", "demo-2-cast reads like the second version of demo"
        await pilot.press("down", "down")
        assert app.screen.query_one(Input).value == "demo-report-2.html"


async def test_save_screen_refuses_an_empty_path(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("e", "ctrl+u", "enter")
        assert notices(app)[-1] == "type the path of the new folder first"
        assert isinstance(app.screen, SaveScreen)


async def test_save_screen_reports_a_path_that_cannot_be_used(app: DtypeApp) -> None:
    async with running(app) as pilot:
        await pilot.press("e")
        for path, says in (("~nobody-of-this-name/x", "can't write ~nobody"), ("x" * 300, "File name too long")):
            app.screen.query_one(Input).value = path
            await pilot.press("enter")
            await pilot.pause()
            assert says in notices(app)[-1]
            assert isinstance(app.screen, SaveScreen)
        assert engine(app).saves == []


@pytest.mark.slow
async def test_session_file_is_updated_when_the_session_changes() -> None:
    async with launched(saver=lambda: SessionSaver(None, "demo", None, Options(prompts=("a",)))) as (app, pilot):
        await pilot.press("j", "j", "2", "j", "3")

        def kept() -> bool:
            if not list(sessions_folder().glob("*.json")):
                return False
            saved = newest_session()
            return saved.recipe == app.controller.experiment.recipe and saved.cursor == "model.layers"

        await until(pilot, kept)
        app.controller.set_settings(RunSettings(autocast="bfloat16"))
        await pilot.press("u", "G")
        last = app.query_one(ModuleTree).current.name
    saved = newest_session()
    assert [len(rules.rows) for rules in saved.rule_lists] == [0, 1, 2]
    assert saved.at == 1
    assert saved.cursor == last != "model.layers"
    assert saved.options == Options(prompts=("a",), settings=RunSettings(autocast="bfloat16"))

    again = make_app(app.controller.experiment.tree, saved=saved)
    async with running(again) as pilot:
        assert again.query_one(ModuleTree).current.name == saved.cursor
        assert again.controller.experiment.recipe == saved.recipe
        assert engine(again).recipes[-1] == saved.recipe
        await pilot.press("ctrl+r")
        assert again.controller.experiment.recipe == saved.rule_lists[2].recipe
        await pilot.press("u", "u")
        assert again.controller.experiment.recipe == Recipe()


async def test_session_is_saved_if_the_terminal_closes_during_the_start() -> None:
    async with launched() as (app, pilot):
        await pilot.press("j", "j", "2")
        recipe = app.controller.experiment.recipe
        assert len(recipe) == 1
        # As while the imports of what keeps it are under way.
        app.launch = msgspec.structs.replace(app.launch, saver=lambda: SessionSaver(None, "demo", None, Options()))
        await asyncio.to_thread(app.on_unmount)  # as the thread that writes does, where the terminal is gone
        (kept,) = sessions_folder().glob("*.json")
        assert read_session(kept).recipe == recipe


@pytest.mark.slow
async def test_session_that_cannot_be_saved_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    async with launched(saver=lambda: SessionSaver(None, "demo", None, Options())) as (app, pilot):
        await until(pilot, lambda: notices(app))
        await pilot.press("2", "j")
        await pilot.pause(0.5)
        assert len(notices(app)) == 1
        assert "--resume will not know this session" in notices(app)[0]


async def test_resumed_session_ignores_a_cursor_on_a_missing_module() -> None:
    async with launched(saved=SavedSession(None, "demo", cursor="gone.since")) as (app, pilot):
        await say(app, pilot, model_ready(app))
        await pilot.press("j")
        assert app.query_one(ModuleTree).cursor == 1


def test_command_line_options_override_options_of_the_saved_session() -> None:
    saved = Options(device="cuda", prompts=("a",), threads=3, settings=RunSettings("bfloat16", "float16", "model"))
    now = Options(device="cpu", trust_remote_code=True, settings=RunSettings(compute="float64"))
    found = with_saved_options(now, saved, {"device", "compute"})
    assert found == Options(
        device="cpu", prompts=("a",), threads=3, trust_remote_code=True,
        settings=RunSettings("float64", "float16", "model"),
    )  # fmt: skip
