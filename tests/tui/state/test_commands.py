"""The command line: its words, what completes them, and what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.recording_engine import app_of, demo_tree, engine, launched, report, say
from tests.helpers.scenes import ready
from tests.helpers.screen_text import lines, notices, screen
from textual.binding import Binding
from textual.pilot import Pilot
from textual.widgets import Input

from dtype_engine.core.errors import UserError
from dtype_engine.recipe import Recipe, Rule, generalisations
from dtype_engine.recipe.presets import PRESETS
from dtype_engine.results.runs import SpeedReport
from dtype_engine.service import events
from dtype_engine.service.jobs import SPEED
from dtype_engine.service.save_requests import ExportRequest, RecipeRequest, ReportRequest
from dtype_tui.app import DtypeApp
from dtype_tui.config.bindings import KEYS
from dtype_tui.main_commands import CommandWords
from dtype_tui.screens.inputs import InputsScreen
from dtype_tui.state.commands import Completer, all_commands, of_keys, parse
from dtype_tui.state.launch import Launch
from dtype_tui.state.results import Results
from dtype_tui.widgets.command_line import CommandLine
from dtype_tui.widgets.module_tree import ModuleTree

COMMANDS = all_commands(
    of_keys(
        [
            Binding("u", "undo", "Undo"),
            Binding("slash", "filter", "Filter"),
            Binding("z", "next_order", "Order"),
            Binding("1", "cast_node('x')", "no"),
        ],
        {},
    )
)
TREE = demo_tree()
COMPLETE = Completer(
    COMMANDS,
    lambda: TREE.names[0],
    lambda: generalisations("model.layers.3.mlp", "LlamaMLP"),
    lambda kind: {"order": ["model", "bytes", "drift"], "preset": list(PRESETS)}.get(kind, []),
)


@pytest.mark.parametrize(
    ("line", "name", "arguments"),
    [
        ("undo", "undo", ()),
        (":undo ", "undo", ()),
        ("next-order", "next-order", ()),
        ("cast *.mlp bf16", "cast", ("*.mlp", "bf16")),
        ("cast   *.mlp   bf16 ", "cast", ("*.mlp", "bf16")),
        ("cast *.mlp=bf16", "cast", ("*.mlp", "bf16")),
        (r"cast re:.*\.(gate|up)_proj fp8@tensor", "cast", (r"re:.*\.(gate|up)_proj", "fp8@tensor")),
        ("filter", "filter", ()),
        ("filter down proj", "filter", ("down proj",)),
        ("go model.layers.1", "go", ("model.layers.1",)),
        ("export my folder/cast", "export", ("my folder/cast",)),
        ("inputs", "inputs", ()),
        ("inputs def main( -> None:", "inputs", ("def main( -> None:",)),
    ],
)
def test_command_lines_are_parsed(line: str, name: str, arguments: tuple[str, ...]) -> None:
    command, found = parse(line, COMMANDS)
    assert (command.name, found) == (name, arguments)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("udno", "did you mean undo?"),
        ("", "no command"),
        ("qqq", "Tab shows all"),
        ("undo 3", "takes no arguments"),
        ("cast", "write cast PATTERN DTYPE"),
        ("cast *.mlp", "write cast PATTERN DTYPE"),
        ("go", "write go NODE"),
        ("export", "write export FOLDER"),
        ("preset ", "write preset PRESET"),
        ("\x1b[31m", "no command"),
    ],
)
def test_invalid_command_line_is_refused_in_one_sentence(line: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(line, COMMANDS)
    assert says in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("u", ["undo"]),
        ("c", ["cast", "check", "columns", "context"]),
        ("cast ", ["cast model.layers.3.mlp", "cast model.layers.*.mlp", "cast *.mlp", "cast type:LlamaMLP"]),
        ("cast model.la", ["cast model.layers.3.mlp", "cast model.layers.*.mlp", "cast model.layers"]),
        ("go model.layers.", ["go model.layers.0", "go model.layers.1"]),
        ("go model.norm.", ["go model.norm.weight"]),
        ("cast *.mlp fp8", ["cast *.mlp fp8", "cast *.mlp fp8e5", "cast *.mlp fp8@t"]),
        ("cast *.mlp fp8:", ["cast *.mlp fp8:imat", "cast *.mlp fp8:gptq"]),
        ("sort b", ["sort bytes"]),
        ("preset ", [f"preset {name}" for name in PRESETS]),
        ("preset fp8", ["preset fp8-linears"]),
        ("undo ", []),
        ("nothing ", []),
    ],
)
def test_command_lines_are_completed(line: str, first: list[str]) -> None:
    assert COMPLETE(line)[: len(first)] == first
    if not first:
        assert COMPLETE(line) == []


def test_every_name_that_is_completed_after_the_command_go_exists() -> None:
    begun = "go "
    for _ in range(6):
        fitting = COMPLETE(begun)
        assert all(line[3:] in TREE.modules or TREE.canonical(line[3:]) is not None for line in fitting), fitting
        if not fitting:
            break
        begun = fitting[0] + "."


def test_paths_in_commands_are_completed_including_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes" / "my own").mkdir(parents=True)
    (tmp_path / "recipes" / "my own" / "b.yaml").touch()
    for name in ("recipe.yaml", ".hidden", "evil\x1b[2J"):
        (tmp_path / name).touch()
    assert COMPLETE(f"recipe {tmp_path}/rec") == [f"recipe {tmp_path}/recipe.yaml", f"recipe {tmp_path}/recipes/"]
    assert COMPLETE(f"report {tmp_path}/") == [f"report {tmp_path}/recipe.yaml", f"report {tmp_path}/recipes/"]
    assert COMPLETE(f"export {tmp_path}/") == [f"export {tmp_path}/recipes/"]
    assert COMPLETE(f"recipe {tmp_path}/.h") == [f"recipe {tmp_path}/.hidden"]
    assert COMPLETE(f"recipe {tmp_path}/missing/x") == []
    assert COMPLETE("recipe ~nobody-of-this-name/") == []
    monkeypatch.chdir(tmp_path)
    assert COMPLETE("export ") == ["export recipes/"]
    assert COMPLETE("recipe recipes/my o") == ["recipe recipes/my own/"]
    assert COMPLETE("recipe recipes/my own/") == ["recipe recipes/my own/b.yaml"]
    assert COMPLETE("inputs recipe.yaml rec") == ["inputs recipe.yaml recipe.yaml", "inputs recipe.yaml recipes/"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert COMPLETE("recipe ~/recipe.") == ["recipe ~/recipe.yaml"]


async def enter(app: DtypeApp, pilot: Pilot[None], line: str) -> None:
    await pilot.press("colon")
    app.query_one(CommandLine).query_one(Input).value = line
    await pilot.pause()
    await pilot.press("enter")
    await pilot.pause()


@pytest.mark.slow
async def test_export_command_writes_to_a_path_completed_with_tab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("casts", "of today").mkdir(parents=True)
    async with launched(size=(80, 24)) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("colon", *"expo", "tab", *"ca", "tab", "tab")
        await pilot.pause()
        assert app.query_one(CommandLine).query_one(Input).value == "export casts/of today/"
        await pilot.press(*"bf16", "enter")
        await pilot.pause()
        assert engine(app).saves == [ExportRequest(Path("casts/of today/bf16"))]
        assert "writing" in screen(app)


@pytest.mark.slow
async def test_files_requested_by_save_commands_contain_the_figures_on_the_screen(tmp_path: Path) -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        await pilot.press("2")
        await enter(app, pilot, f"recipe {tmp_path}/a b.yaml")
        measured = report(app.controller.experiment.recipe)
        app.controller.experiment.results = Results(report=measured)
        await enter(app, pilot, f"recipe {tmp_path}/c.yaml")
        await enter(app, pilot, f"report {tmp_path}/r.html")
        timed = SpeedReport("m", "cpu", 1, (), "inputs", ())
        await say(app, pilot, events.JobDone(app.controller.experiment.recipe, SPEED.ask(None), timed))
        await pilot.press("escape")
        await enter(app, pilot, f"report {tmp_path}/s.html")
        (tmp_path / "empty").mkdir()
        await enter(app, pilot, f"export {tmp_path}/empty")
        assert engine(app).saves == [
            RecipeRequest(tmp_path / "a b.yaml"),
            RecipeRequest(tmp_path / "c.yaml", drift=measured),
            ReportRequest(tmp_path / "r.html", drift=measured),
            ReportRequest(tmp_path / "s.html", drift=measured, speed=timed),
            ExportRequest(tmp_path / "empty"),
        ]


@pytest.mark.slow
async def test_save_commands_do_not_overwrite_existing_files(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    async with launched(size=(80, 24)) as (app, pilot):
        for line in (
            f"export {tmp_path}/full", f"export {tmp_path}/full/mine", f"recipe {tmp_path}/full/mine",
            f"report {tmp_path}/full",
        ):  # fmt: skip
            await enter(app, pilot, line)
            assert (
                notices(app)[-1] == f"{line.partition(' ')[2]} already exists: to replace it, use e, which asks first"
            )
        await enter(app, pilot, "recipe ~nobody-of-this-name/r.yaml")
        assert notices(app)[-1].startswith("can't write ~nobody-of-this-name/r.yaml: ")
        await enter(app, pilot, f"report {tmp_path}/{'x' * 300}.html")
        assert "File name too long" in notices(app)[-1]
        assert engine(app).saves == []


@pytest.mark.slow
async def test_preset_command_applies_or_says_why_not() -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        await pilot.press("3", "colon", *"preset all", "tab", "enter")
        await pilot.pause()
        assert app.controller.experiment.recipe == Recipe((Rule("*", "bfloat16"),)) == engine(app).recipes[-1]
        for line, says in (
            ("preset all-bf16", "already applied"),
            ("preset fp8-linears", "matches module classes"),
            ("preset all-bf15", "did you mean all-bf16?"),
        ):
            await enter(app, pilot, line)
            assert says in notices(app)[-1]
        await pilot.press("u")
        assert app.controller.experiment.recipe == Recipe((Rule("*", "float16"),))


async def test_inputs_command_uses_its_argument_or_without_one_opens_the_window() -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        await enter(app, pilot, "inputs import os")
        assert "known when the model is loaded" in notices(app)[-1]
        await ready(app, pilot)
        await enter(app, pilot, "inputs import os, sys")
        assert engine(app).lines == ["import os, sys"]
        assert "preparing the inputs" in screen(app)
        await say(app, pilot, events.InputsRefused("there is no os"))
        assert notices(app)[-1] == "there is no os"
        await enter(app, pilot, "inputs")
        assert isinstance(app.screen, InputsScreen)


async def test_save_commands_are_refused_before_the_model_is_known(tmp_path: Path) -> None:
    app = app_of(Launch("x.py:Y"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        for line, says in ((f"export {tmp_path}/x", "nothing to write"), ("preset all-bf16", "not known yet")):
            await enter(app, pilot, line)
            assert says in notices(app)[-1]
        assert engine(app).saves == engine(app).recipes == []


@pytest.mark.slow
async def test_cast_command_is_completed_previewed_and_applied() -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        await pilot.press("colon", *"cast *.ml")
        await pilot.press(*"p bf", "tab")
        await pilot.pause()
        assert app.query_one(CommandLine).query_one(Input).value == "cast *.mlp bf16"
        assert "matches 18 tensors" in screen(app)
        assert app.query_one(ModuleTree).preview is not None
        await pilot.press("enter")
        await pilot.pause()
        assert app.controller.experiment.recipe.rules == (Rule("*.mlp", "bfloat16"),)
        assert app.query_one(ModuleTree).preview is None
        assert app.query_one(ModuleTree).has_focus


@pytest.mark.slow
async def test_command_line_has_a_history_and_is_closed_by_esc() -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        for line in ("go model.layers.2", "sort bytes"):
            await enter(app, pilot, line)
        assert app.query_one(ModuleTree).order == "bytes"
        await pilot.press("colon", "up", "up")
        field = app.query_one(CommandLine).query_one(Input)
        assert field.value == "go model.layers.2"
        await pilot.press("up", "down")
        assert field.value == "sort bytes"
        await pilot.press("down")
        assert field.value == ""
        await pilot.press("escape")
        assert not app.query_one(CommandLine).has_class("open")
        assert app.query_one(ModuleTree).has_focus


async def test_tab_cycles_through_completions() -> None:
    async with launched() as (app, pilot):
        await pilot.press("colon", *"cast ", "tab")
        field = app.query_one(CommandLine).query_one(Input)
        assert field.value == "cast *"
        await pilot.press("tab")
        second = field.value
        await pilot.press("tab", "shift+tab")
        assert field.value == second != "cast *"


@pytest.mark.slow
async def test_invalid_command_shows_the_error_in_the_open_line_or_in_a_notice() -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        await enter(app, pilot, "cast *.mlp bfloat17")
        assert app.query_one(CommandLine).has_class("open")
        assert "did you mean bfloat16" in screen(app)
        await pilot.press("escape")
        for line, says in (
            ("go model.nowhere", "there is no model.nowhere"),
            ("sort size", "sorted by model, bytes, drift"),
            ("theme mauve", "no theme mauve"),
            ("columns speed", "columns are params, bytes, drift"),
        ):
            await enter(app, pilot, line)
            assert says in notices(app)[-1]


@pytest.mark.slow
async def test_commands_columns_theme_filter_and_undo_take_effect() -> None:
    async with launched() as (app, pilot):
        await enter(app, pilot, "columns bytes")
        assert "SQNR" not in lines(app)[1]
        assert "bytes" in lines(app)[1]
        await enter(app, pilot, "columns")
        assert "SQNR" in lines(app)[1]
        await enter(app, pilot, "theme high-contrast")
        assert app.theme == "high-contrast"
        await enter(app, pilot, "filter down_proj")
        assert app.query_one(ModuleTree).current.name.endswith("down_proj")
        await enter(app, pilot, "filter")
        assert app.query_one(ModuleTree).filter_text == ""
        await enter(app, pilot, "cast * f16")
        await enter(app, pilot, "undo")
        assert app.controller.experiment.recipe.rules == ()


async def test_every_key_of_the_main_screen_is_also_a_command() -> None:
    async with launched(size=(80, 24)) as (app, _):
        known = app.query_one(CommandLine).completer.commands
        actions = {command.action for command in known.values()}
        words = CommandWords(app.controller, app.main.tree_view).actions
        for binding in KEYS:
            assert isinstance(binding, Binding)
            if "(" not in binding.action and binding.action not in ("command", "filter", "cast"):
                assert binding.action in actions, binding
        for command in known.values():
            holder = app if command.action.startswith("app.") else app.main
            name = command.action.removeprefix("app.").partition("(")[0]
            assert command.action in words or hasattr(holder, f"action_{name}"), command
