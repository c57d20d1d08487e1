"""Layers that are alike are one row of the tree: what it shows, what keys do to it, and what splits it."""

from __future__ import annotations

import math

import pytest
from tests.helpers.recording_engine import make_app, report, running, say
from tests.helpers.scenes import opened
from tests.helpers.screen_text import lines, notices, screen, until
from textual.widgets import Input

from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.recipe import Recipe, Rule, compile_pattern, make_plan
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.config.config import Config
from dtype_tui.state.folds import Folds, fold_members, fold_name, node_label, patterns_for
from dtype_tui.widgets.prompts import CastPrompt

LAYERS = "model.layers.{0..5}"


def shown(app: DtypeApp) -> list[str]:
    """Return the labels of the rows below the layers, indented as in the tree."""
    return [
        " " * (row.depth - 3) + row.label for row in app.main.tree_view.rows if row.name.startswith("model.layers.")
    ]


def rules(app: DtypeApp) -> list[str]:
    return [str(rule) for rule in app.controller.experiment.recipe.rules]


def drifts(*decibels: float | None, nonfinite: int = 0) -> tuple[ModuleDrift, ...]:
    return tuple(ModuleDrift(f"model.layers.{i}", value, 0.1, nonfinite) for i, value in enumerate(decibels))


def measured(app: DtypeApp, *decibels: float | None) -> events.Event:
    recipe = app.controller.experiment.recipe
    return events.Measured(recipe, report(recipe, modules=drifts(*decibels)))


def _layers(*labels: str) -> Tree:
    return from_tensors(TensorInfo(f"model.layers.{label}.weight", (4, 4), "float32") for label in labels)


# -- the state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ("2 3 4 5 6 7 8 9 10", "model.layers.{2..10}"),
        ("0 1 2 4 6 7", "model.layers.{{0..2},4,{6..7}}"),
        ("00 01 02 03", "model.layers.{00,01,02,03}"),
        ("1 3 5 7", "model.layers.{1,3,5,7}"),
    ],
)
def test_name_of_folded_layers_is_the_pattern_of_its_members(labels: str, name: str) -> None:
    tree = _layers(*labels.split(), "odd.more")
    (members,) = (each for each in Folds(tree, {}, {}).below(tree.modules["model.layers"]) if len(each) > 1)
    assert fold_name(members) == name
    pattern = compile_pattern(name)
    matching = [module.name for module in tree.modules.values() if pattern.matches(module.name)]
    assert matching == [f"model.layers.{label}" for label in labels.split()]
    assert [module.name for module in fold_members(tree, name)] == matching
    first, *_, last = labels.split()
    assert node_label(tree, name) == f"{first} … {last}"
    assert patterns_for(tree, name) == [name, "model.layers.*"]


@pytest.mark.parametrize(
    "node", ["", "model", "model.layers.3", "model.layers.{", "{", "x.{0..5}", "model.layers.3.weight"]
)
def test_name_that_is_not_one_of_folded_layers_has_no_members(node: str) -> None:
    assert fold_members(_layers(*"012345"), node) == ()


def _runs(tree: Tree, *decibels: float | None, nonfinite: int = 0) -> list[int]:
    drift = {module.name: module for module in drifts(*decibels, nonfinite=nonfinite)}
    return [len(members) for members in Folds(tree, {}, drift).below(tree.modules["model.layers"])]


def test_layers_with_very_different_drift_are_not_folded_together() -> None:
    tree = _layers(*map(str, range(8)))
    assert _runs(tree) == [8]
    assert _runs(tree, 40.0, 42.0, 46.0, 41.0, 39.0, 39.0, 40.0, 41.0) == [4, 4]
    assert _runs(tree, 40.0, None, None, 41.0, 29.4, 39.0, 40.0, 41.0) == [4, 1, 1, 1, 1]
    assert _runs(tree, math.inf, 95.0, 85.0, math.inf, 81.0, 79.0, 78.0, 77.0) == [8], "nobody sees this drift"
    assert _runs(tree, *[10.0] * 8, nonfinite=1) == [8]


def test_layers_with_different_shapes_or_planned_dtypes_are_not_folded_together() -> None:
    tensors = [TensorInfo(f"model.layers.{i}.weight", (4, 4), "float32") for i in range(12)]
    tensors[5] = TensorInfo("model.layers.5.weight", (4, 8), "float32")
    tree = from_tensors(tensors)
    parent = tree.modules["model.layers"]
    assert [len(each) for each in Folds(tree, {}, {}).below(parent)] == [5, 1, 6]
    plan = make_plan(tree, Recipe((Rule("model.layers.6", "bfloat16"),)))
    assert [len(each) for each in Folds(tree, plan.dtypes, {}).below(parent)] == [5, 1, 1, 5]
    named = {
        member.name: [each.name for each in Folds(tree, {}, {}).around(member) or ()]
        for member in parent.children.values()
    }
    assert named["model.layers.5"] == []
    assert named["model.layers.11"] == [f"model.layers.{i}" for i in range(6, 12)]


# -- the tree --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layer_that_is_in_two_files_is_folded_with_the_others() -> None:
    parts = ["attn.q", "attn.o", "mlp.up", "mlp.down"]
    names = [f"model.layers.{i}.{part}.weight" for i in range(8) for part in (parts if i != 5 else reversed(parts))]
    tensors = [TensorInfo(name, (4, 4), "float32") for name in names]
    assert _runs(from_tensors(tensors)) == [8]
    classes = {name.removesuffix(".weight"): "Linear" for name in names}
    assert _runs(Tree(tensors, classes)) == [5, 1, 1, 1], "the order of a loaded model is its own"


@pytest.mark.slow
@pytest.mark.parametrize("opens", ["l", "right", "space"])
async def test_folded_layers_are_opened_and_closed_by_keys(opens: str) -> None:
    async with opened() as (app, pilot):
        await pilot.press("j", "j", "j", "j")
        tree = app.main.tree_view
        assert (tree.current.name, shown(app)) == (LAYERS, ["0 … 5"])
        (line,) = (line for line in lines(app) if "0 … 5" in line)
        assert "▸ 0 … 5  6 alike" in line
        assert "2.3 MiB" in line, "the bytes of all"
        await pilot.press(opens)
        assert shown(app) == ["0 … 5", " 0", " 1", " 2", " 3", " 4", " 5"]
        await pilot.press("j", "j", "P")
        assert tree.current.name == LAYERS
        await pilot.press("space" if opens == "space" else "h")
        assert shown(app) == ["0 … 5"]
        await pilot.press("E")
        assert "model.layers.5.mlp.up_proj.weight" in {row.name for row in tree.rows}
        await pilot.press("W")
        assert shown(app) == ["0 … 5"]
        await pilot.press("l", "F")
        assert shown(app) == ["0", "1", "2", "3", "4", "5"]
        assert tree.current.name == "model.layers.0"
        await pilot.press("F")
        assert (tree.current.name, shown(app)) == (LAYERS, ["0 … 5"])


@pytest.mark.slow
async def test_cast_of_folded_layers_is_one_rule_for_all_members() -> None:
    async with opened() as (app, pilot):
        app.main.tree_view.go_to(LAYERS)
        await pilot.press("2")
        assert rules(app) == [f"{LAYERS}=bfloat16"]
        planned = app.controller.experiment.plan.dtypes
        assert {planned[name] for name in planned if name.startswith("model.layers.")} == {"bfloat16"}
        assert "here: 54 tensors by rule 1" in screen(app)
        await pilot.press("2")
        assert notices(app)[-1] == f"{LAYERS} is bfloat16 already"
        await pilot.press("enter")
        await pilot.pause()
        page = screen(app)
        assert "6 neighbors that are alike" in page
        assert "1.16 MiB  bf16" in page
        await pilot.press("escape", "y", "x")
        assert app.clipboard == LAYERS
        assert rules(app) == []
        await pilot.press("u", "c")
        assert app.query_one(CastPrompt).query_one(Input).value == f"{LAYERS}=bf16"
        await pilot.press("tab")
        assert app.query_one(CastPrompt).query_one(Input).value == "model.layers.*=bf16"
        await pilot.press("escape", "question_mark")
        await pilot.pause()
        assert f"Here: {LAYERS}" in screen(app)


@pytest.mark.slow
async def test_layer_with_another_planned_dtype_is_not_folded_with_the_others() -> None:
    async with opened(tree=_layers(*map(str, range(12)))) as (app, pilot):
        tree = app.main.tree_view
        tree.go_to("model.layers.{0..11}")
        app.controller.add_rule(Rule("model.layers.5", "bfloat16"))
        assert shown(app) == ["0 … 4", "5", "6 … 11"]
        assert tree.current.name == "model.layers.{0..4}", "the fold that has what was under the cursor"
        await pilot.press("u")
        assert shown(app) == ["0 … 11"]
        await pilot.press("l", *["j"] * 8, "2")
        assert tree.current.name == "model.layers.7"
        assert [label for label in shown(app) if "…" in label or not label.startswith(" ")] == ["0 … 6", "7", "8 … 11"]
        await pilot.press("right_curly_bracket")
        assert tree.current.name == "model.layers.7"
        app.controller.add_rule(Rule("model.layers.{0..3}", "float16"))
        await pilot.press("F", "F", "home", "right_curly_bracket")
        assert tree.current.name == "model.layers.{0..3}", "a closed fold is one step"
        await pilot.press("right_curly_bracket")
        assert tree.current.name == "model.layers.7"
        await pilot.press("left_curly_bracket")
        assert tree.current.name == "model.layers.{0..3}"


async def test_measured_drift_splits_folded_layers_except_at_the_cursor() -> None:
    decibels = (50.0, 49.0, 48.0, 47.0, 30.0, 42.0, 41.0, 40.0, 39.5)
    async with opened(tree=_layers(*map(str, range(9)))) as (app, pilot):
        await pilot.press("2")
        await say(app, pilot, measured(app, *decibels))
        assert shown(app) == ["0 … 3", "4", "5 … 8"]
        drawn = {row.split()[1]: row.split("MiB")[-1] for row in lines(app) if " alike" in row}
        first, last = (next(line for line in lines(app) if label in line) for label in ("0 … 3", "5 … 8"))
        assert " 47.0 " in first, "of the worst member"
        assert " 39.5 " in last, drawn
        await pilot.press("F", "F", "3")
        app.main.tree_view.go_to("model.layers.{5..8}")
        await say(app, pilot, measured(app, *[30.0] * 9))
        assert app.main.tree_view.current.name == "model.layers.{5..8}"
        await pilot.press("home")
        assert shown(app) == ["0 … 8"]


async def test_folded_layers_are_opened_when_the_cursor_goes_to_a_module_inside() -> None:
    async with opened(size=(80, 24)) as (app, pilot):
        await pilot.press("2")
        await say(app, pilot, measured(app, 40.0, 39.0, 38.0, 37.0, 36.0, 35.0))
        assert shown(app) == ["0 … 5"]
        await pilot.press("w")
        assert app.main.tree_view.current.name == "model.layers.5"
        assert len(shown(app)) == 7
        await pilot.press("P", "h")
        assert shown(app) == ["0 … 5"]
        assert app.main.tree_view.go_to("model.layers.2.mlp.up_proj")
        assert app.main.tree_view.current.name == "model.layers.2.mlp.up_proj"
        assert not app.main.tree_view.go_to("model.layers.{0..")
        await pilot.press("F", "F")
        assert app.main.tree_view.go_to("model.layers.{1..4}"), "a fold of an earlier session"
        assert app.main.tree_view.current.name == LAYERS


@pytest.mark.slow
async def test_filter_counts_matches_inside_folded_layers() -> None:
    async with opened() as (app, pilot):
        await pilot.press("slash", *"layers.3.mlp")
        await pilot.pause()
        assert shown(app) == ["0 … 5"]
        assert "6 alike, 7 match" in screen(app)
        await pilot.press("enter")
        assert app.main.tree_view.current.name == "model.layers.3.mlp"
        await pilot.press("N")
        assert app.main.tree_view.current.name == "model.layers.3.mlp.up_proj.weight"
        await pilot.press("escape", "F", "F", "c")
        app.query_one(CastPrompt).query_one(Input).value = "*.{1,2}.mlp=bf16"
        await until(pilot, lambda: "6 inside" in screen(app))
        app.query_one(CastPrompt).query_one(Input).value = "model.layers=bf16"
        await until(pilot, lambda: "•   " in next(line for line in lines(app) if "0 … 5" in line))


async def test_folding_of_layers_can_be_disabled_in_the_config() -> None:
    app = make_app(config=Config(fold=False))
    async with running(app, (80, 24)):
        assert shown(app) == ["0", "1", "2", "3", "4", "5"]
