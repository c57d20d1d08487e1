"""The panes: what stays where it is, what changes, and a pane alone."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial

import msgspec
import pytest
from rich.segment import Segment
from tests.helpers.recording_engine import engine, make_app, model_ready, report, running, say
from tests.helpers.scenes import MIXED, measured_in_part, mixed, modules, opened, ready
from tests.helpers.screen_text import lines, screen, until
from textual.events import MouseScrollDown
from textual.geometry import Region
from textual.pilot import Pilot

from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Plan, Recipe, Rule
from dtype_engine.recipe.loading import Loading
from dtype_engine.results.losses import ValueLoss
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.state.experiment import Experiment
from dtype_tui.state.loading import loadings
from dtype_tui.widgets import loading
from dtype_tui.widgets.panes.base import Pane

BF16 = Recipe((Rule("*", "bfloat16"),))
SIZES = [(60, 15), (80, 24), (100, 24), (120, 36), (200, 50)]


def drift(app: DtypeApp) -> str:
    return words(app.main.side.panes[0])


def words(pane: Pane) -> str:
    """Return what a pane shows inside its frame."""
    rows = (pane.render_line(y).text[2:-2] for y in range(1, pane.size.height - 1))
    return "\n".join(row.rstrip() for row in rows).rstrip()


def is_dim(pane: Pane, text: str) -> bool:
    """Return whether the part of a pane that contains this text is dim."""
    found: list[Segment] = [part for y in range(pane.size.height) for part in pane.render_line(y) if text in part.text]
    return bool(found) and all(part.style is not None and bool(part.style.dim) for part in found)


async def measured(app: DtypeApp, pilot: Pilot[None], recipe: Recipe, kl: float) -> None:
    app.controller.apply_recipe(recipe)
    found = report(recipe, modules=modules())
    output = dataclasses.replace(found.output, kl_mean=kl)
    await say(app, pilot, events.Measured(recipe, dataclasses.replace(found, output=output)), events.Idle())


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_drift_pane_names_the_reference_beside_the_kl(size: tuple[int, int]) -> None:
    async with opened(size=size) as (app, pilot):
        experiment, pane = app.controller.experiment, app.main.side.panes[0]
        for reference, shown in (
            ("float32", ["KL 2.20e-5 ± 1e-5 nats vs float32"]),
            ("as stored (bfloat16)", ["KL 2.20e-5 nats vs stored bfloat16"]),
            ("as stored (bfloat16, float32)", ["KL 2.20e-5 ± 1e-5 nats", "vs stored bfloat16, float32"]),
            ("/models/other", ["KL 2.20e-5 nats vs /models/other"]),
        ):
            experiment.model = msgspec.structs.replace(experiment.model, reference=reference)
            await measured(app, pilot, BF16, 2.2e-5)
            rows = [pane.render_line(y).text for y in range(pane.size.height)]
            at = next(index for index, row in enumerate(rows) if "KL 2.20e-5" in row)
            assert all(words in row for words, row in zip(shown, rows[at:], strict=False)), reference


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_drift_pane_shows_lost_values_below_the_word_for_the_drift(size: tuple[int, int]) -> None:
    async with opened(size=size) as (app, pilot):
        await measured(app, pilot, BF16, 2.2e-5)
        lost = ValueLoss("model.norm.weight", "bfloat16", overflowed=2, vanished=0, elements=96)
        await say(app, pilot, events.CastDone(BF16, (lost,)))
        rows = screen(app).splitlines()
        places = [next(y for y, row in enumerate(rows) if words in row) for words in ("KL 2.20e-5", "small", "2 of 96")]
        assert places == sorted(places)


async def test_drift_pane_dims_figures_of_the_previous_recipe() -> None:
    async with opened() as (app, pilot):
        await measured(app, pilot, BF16, 2.2e-5)
        pane = app.main.side.panes[0]
        assert "KL 2.20e-5 ± 1e-5 nats" in drift(app)
        assert not is_dim(pane, "2.20e-5")
        assert "6 of 6 sequences" in screen(app)
        await pilot.press("j", "3")
        await pilot.pause()
        assert "KL 2.20e-5" in drift(app)
        assert is_dim(pane, "2.20e-5")
        assert "6 of 6 sequences" not in screen(app), "these are figures of the recipe before"
        current = app.controller.experiment.recipe
        await measured(app, pilot, current, 2.6e-5)
        assert "KL 2.20e-5 → 2.60e-5 ▲" in drift(app)
        await pilot.press("u")
        await measured(app, pilot, BF16, 2.2e-5)
        assert "KL 2.60e-5 → 2.20e-5 ▼" in drift(app)


async def test_measuring_a_recipe_again_shows_no_change_of_its_drift() -> None:
    async with opened() as (app, pilot):
        await measured(app, pilot, BF16, 2.2e-5)
        await pilot.press("m")
        await say(app, pilot, events.Measured(BF16, report(BF16)), events.Idle())
        assert "→" not in drift(app)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
async def test_panes_do_not_move_when_their_text_changes(size: tuple[int, int]) -> None:
    app = make_app()

    def places() -> list[Region]:
        return [pane.region for pane in (*app.main.side.panes, app.main.depth) if pane.region]

    async with running(app, size) as pilot:
        await ready(app, pilot)
        before = places()
        await measured_in_part(app, pilot)
        assert places() == before
        await mixed(app, pilot)
        assert places() == before
        if size[0] >= 100:
            drift_pane, memory, recipe = app.main.side.panes
            assert drift_pane.region.height + memory.region.height + recipe.region.height == app.main.side.size.height
            assert recipe.region.height >= app.main.side.size.height // 3
        assert bool(app.main.depth.region) == (size[0] >= 120 and size[1] >= 36)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_key_plus_shows_one_pane_alone_and_then_all_panes_again(size: tuple[int, int]) -> None:
    async with opened(mixed, size=size) as (app, pilot):
        for back in ("plus", "escape"):
            await pilot.press("plus")
            await until(pilot, lambda: "mean |Δ|" in screen(app))
            await pilot.press(*["j"] * 9)
            await until(pilot, lambda: "0.20 s (reference 0.10 s)" in screen(app))
            assert "max 3.0e-03" in screen(app)
            assert app.main.side.panes[0].region.width == size[0]
            assert not app.main.tree_view.region
            await pilot.press(back)
            await until(pilot, lambda: "reference 0.10 s" not in screen(app))
            assert app.main.tree_view.has_focus
            assert app.main.tree_view.region


@pytest.mark.slow
@pytest.mark.parametrize("key", ["w", "slash"])
async def test_tree_keys_show_the_tree_again_after_a_maximized_pane(key: str) -> None:
    async with opened(mixed) as (app, pilot):
        await pilot.press("plus")
        await until(pilot, lambda: not app.main.tree_view.region)
        await pilot.press(key)
        await until(pilot, lambda: bool(app.main.tree_view.region))


async def test_tab_cycles_through_panes_and_tree() -> None:
    async with opened(mixed) as (app, pilot):
        seen = []
        for _ in range(4):
            await pilot.press("tab")
            seen.append(app.focused.id if app.focused is not None else None)
        assert seen == ["drift", "memory", "recipe", "tree"]


@pytest.mark.slow
async def test_rules_are_edited_in_the_recipe_pane_and_restored_by_undo() -> None:
    async with opened(mixed) as (app, pilot):
        experiment, recipe = app.controller.experiment, app.main.side.recipe
        await pilot.press("r")
        assert recipe.current == MIXED.rules[2], "the rule that decides the node under the tree's cursor"
        assert "▌3 model.layers.{4..5}" in words(recipe)
        await pilot.press("space")
        assert experiment.recipe.rules == MIXED.rules[:2]
        assert engine(app).recipes[-1] == experiment.recipe
        assert "▌– model.layers.{4..5}" in words(recipe)
        assert "off" in words(recipe)
        asked = len(engine(app).recipes)
        await pilot.press("K")
        assert len(engine(app).recipes) == asked, "nothing changes for the model"
        await pilot.press("space")
        assert experiment.recipe.rules == (MIXED.rules[0], MIXED.rules[2], MIXED.rules[1])
        await pilot.press("enter")
        await until(pilot, lambda: app.focused is not None and app.focused.id == "cast-input")
        await pilot.press("end", *["backspace"] * len("float8_e4m3fn"))
        app.focused.value = "model.layers.5.mlp=f16"  # type: ignore[union-attr]
        await pilot.press("enter")
        assert experiment.recipe.rules[1] == Rule("model.layers.5.mlp", "float16")
        assert app.focused is recipe
        await pilot.press("x")
        assert len(experiment.rules.rows) == 2
        await pilot.press(*["u"] * 5)
        assert experiment.recipe == MIXED
        assert all(row.enabled for row in experiment.rules.rows)


@pytest.mark.slow
async def test_recipe_pane_scrolls_with_its_cursor() -> None:
    async with opened(size=(80, 24)) as (app, pilot):
        rules = [
            Rule(f"model.layers.{layer}.{part}", "bfloat16") for layer in range(6) for part in ("mlp", "self_attn")
        ]
        app.controller.apply_recipe(Recipe(tuple(rules)))
        await pilot.press("r")
        await pilot.pause()
        for rule in reversed(rules):
            assert any(f"▌{rules.index(rule) + 1:<2} {rule.pattern} " in line for line in lines(app)), screen(app)
            await pilot.press("k")
            await pilot.pause()


@pytest.mark.slow
async def test_panes_have_frames_again_when_the_terminal_grows() -> None:
    async with opened(mixed, size=(60, 15)) as (app, pilot):
        for size in ((80, 24), (120, 36), (80, 24), (120, 36)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
        await until(pilot, lambda: all(f"─ {title} ─" in screen(app) for title in ("Drift", "Memory", "Recipe")))


async def test_mouse_wheel_moves_the_cursor_among_rules() -> None:
    async with opened(mixed) as (app, pilot):
        await pilot.press("r")
        pane = app.main.side.recipe
        pane.cursor = 0
        for expected in (1, 2):
            pane.post_message(MouseScrollDown(pane, 2, 2, 0, 1, 0, False, False, False))
            await pilot.pause()
            assert pane.cursor == expected


@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_recipe_pane_says_which_programs_load_an_export_of_the_rules(size: tuple[int, int]) -> None:
    async with opened(size=size) as (app, pilot):
        known = app.controller.experiment.tree
        classes = {name: "Linear" if name.endswith("_proj") else "Module" for name in known.modules}
        tree = Tree(known.tensors.values(), classes)
        await say(app, pilot, msgspec.structs.replace(model_ready(app), loader="transformers", tree=tree))
        pane = app.main.side.recipe
        for rule, mark in (("*.q_proj=fp8", "vLLM ✗"), ("*.{q,k,v}_proj=fp8", "vLLM ✓")):
            app.controller.apply_recipe(Recipe((Rule.parse(rule),)))
            app.main.side.activate(pane)
            await until(pilot, partial(lambda mark: mark in screen(app), mark), 20)
            assert "loads in: transformers ✓" in screen(app)
            assert "dtype-engine ✓" in screen(app)


async def test_recipe_pane_says_that_the_loading_programs_of_a_large_model_are_being_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()

    def slow(experiment: Experiment, plan: Plan) -> tuple[Loading, ...]:
        assert may_end.wait(60)
        return loadings(experiment, plan)

    monkeypatch.setattr(loading, "_MANY", 0)
    monkeypatch.setattr(loading, "loadings", slow)
    async with opened() as (app, pilot):
        known = app.controller.experiment.tree
        tree = Tree(known.tensors.values(), dict.fromkeys(known.modules, "Module"))
        await say(app, pilot, msgspec.structs.replace(model_ready(app), loader="transformers", tree=tree))
        app.controller.apply_recipe(Recipe((Rule.parse("*.q_proj=float16"),)))
        app.main.side.activate(app.main.side.recipe)
        await until(pilot, lambda: "loads in: …" in screen(app), 20)
        may_end.set()
        await until(pilot, lambda: "loads in: transformers ✓" in screen(app), 20)
