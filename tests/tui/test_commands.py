"""The command line: its words, what completes them, and what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from noting import demo_tree, make_app
from rows import lines, notices, screen
from textual.binding import Binding
from textual.widgets import Input

from dtype_engine.errors import UserError
from dtype_engine.recipe import Rule, generalisations
from dtype_tui.app import DtypeApp
from dtype_tui.commands import Completer, all_commands, parse
from dtype_tui.widgets.command_line import CommandLine
from dtype_tui.widgets.module_tree import ModuleTree

COMMANDS = all_commands([("undo", "Undo"), ("filter", "Filter"), ("next_order", "Order"), ("cast_node('x')", "no")])
TREE = demo_tree()
COMPLETE = Completer(
    COMMANDS,
    lambda: TREE.names[0],
    lambda: generalisations("model.layers.3.mlp", "LlamaMLP"),
    lambda kind: {"order": ["model", "bytes", "drift"]}.get(kind, []),
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
    ],
)
def test_lines_are_read(line: str, name: str, arguments: tuple[str, ...]) -> None:
    command, found = parse(line, COMMANDS)
    assert (command.name, found) == (name, arguments)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("udno", "did you mean undo?"),
        ("", "no command"),
        ("qqq", "Tab shows all"),
        ("undo 3", "takes no words"),
        ("cast", "write cast PATTERN DTYPE"),
        ("cast *.mlp", "write cast PATTERN DTYPE"),
        ("go", "write go NODE"),
        ("\x1b[31m", "no command"),
    ],
)
def test_what_can_not_be_read_is_a_sentence(line: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(line, COMMANDS)
    assert says in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("u", ["undo"]),
        ("c", ["cast", "columns"]),
        ("cast ", ["cast model.layers.3.mlp", "cast model.layers.*.mlp", "cast *.mlp", "cast type:LlamaMLP"]),
        ("cast model.la", ["cast model.layers.3.mlp", "cast model.layers.*.mlp", "cast model.layers"]),
        ("go model.layers.", ["go model.layers.0", "go model.layers.1"]),
        ("go model.norm.", ["go model.norm.weight"]),
        ("cast *.mlp fp8", ["cast *.mlp fp8", "cast *.mlp fp8e5", "cast *.mlp fp8@t"]),
        ("sort b", ["sort bytes"]),
        ("undo ", []),
        ("nothing ", []),
    ],
)
def test_completions(line: str, first: list[str]) -> None:
    assert COMPLETE(line)[: len(first)] == first
    if not first:
        assert COMPLETE(line) == []


def test_every_completion_of_a_name_can_be_gone_to() -> None:
    begun = "go "
    for _ in range(6):
        fitting = COMPLETE(begun)
        assert all(line[3:] in TREE.modules or TREE.canonical(line[3:]) is not None for line in fitting), fitting
        if not fitting:
            break
        begun = fitting[0] + "."


def test_files_complete_by_folder(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / ".hidden").touch()
    from dtype_tui.commands import _paths

    assert _paths(f"{tmp_path}/rec") == [f"{tmp_path}/recipe.yaml", f"{tmp_path}/recipes/"]
    assert _paths(f"{tmp_path}/") == [f"{tmp_path}/recipe.yaml", f"{tmp_path}/recipes/"]
    assert _paths(f"{tmp_path}/.h") == [f"{tmp_path}/.hidden"]
    assert _paths(f"{tmp_path}/missing/x") == []


async def enter(app: DtypeApp, pilot: object, line: str) -> None:
    await pilot.press("colon")  # type: ignore[attr-defined]
    app.query_one(CommandLine).query_one(Input).value = line
    await pilot.pause()  # type: ignore[attr-defined]
    await pilot.press("enter")  # type: ignore[attr-defined]
    await pilot.pause()  # type: ignore[attr-defined]


async def test_a_cast_is_typed_completed_previewed_and_applied() -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("colon", *"cast *.ml")
        await pilot.press(*"p bf", "tab")
        await pilot.pause()
        assert app.query_one(CommandLine).query_one(Input).value == "cast *.mlp bf16"
        assert "takes 18 tensors" in screen(app)
        assert app.query_one(ModuleTree).preview is not None
        await pilot.press("enter")
        await pilot.pause()
        assert app.experiment.recipe.rules == (Rule("*.mlp", "bfloat16"),)
        assert app.query_one(ModuleTree).preview is None
        assert app.query_one(ModuleTree).has_focus


async def test_history_and_leaving() -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
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


async def test_tab_walks_through_what_fits_and_back() -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause()
        await pilot.press("colon", *"cast ", "tab")
        field = app.query_one(CommandLine).query_one(Input)
        assert field.value == "cast *"
        await pilot.press("tab")
        second = field.value
        await pilot.press("tab", "shift+tab")
        assert field.value == second != "cast *"


async def test_what_is_wrong_stays_in_the_line_or_is_a_notice() -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
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


async def test_columns_themes_filters_and_actions_by_name() -> None:
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause()
        await enter(app, pilot, "columns bytes")
        assert "params" not in lines(app)[0]
        assert "bytes" in lines(app)[0]
        await enter(app, pilot, "columns")
        assert "params" in lines(app)[0]
        await enter(app, pilot, "theme high-contrast")
        assert app.theme == "high-contrast"
        await enter(app, pilot, "filter down_proj")
        assert app.query_one(ModuleTree).current.name.endswith("down_proj")
        await enter(app, pilot, "filter")
        assert app.query_one(ModuleTree).filter_text == ""
        await enter(app, pilot, "cast * f16")
        await enter(app, pilot, "undo")
        assert app.experiment.recipe.rules == ()


async def test_every_key_without_words_is_a_command() -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await pilot.pause()
        known = app.query_one(CommandLine).completer.commands
        actions = {command.action for command in known.values()}
        for binding in app.BINDINGS:
            assert isinstance(binding, Binding)
            if "(" not in binding.action and binding.action not in ("command", "filter", "cast"):
                assert binding.action in actions, binding
        for command in known.values():
            assert hasattr(app, f"action_{command.action}"), command
