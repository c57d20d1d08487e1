"""The tour: each step waits for its key, and everything else works as ever. The engine says what it would say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tests.helpers.observations import rules, top
from tests.helpers.recording_engine import engine, launched, make_app, report, say
from tests.helpers.scenes import DOWN, causes, ready, scanned
from tests.helpers.screen_text import lines, notices, screen, until
from textual.pilot import Pilot

from dtype_engine.core.options import RunSettings
from dtype_engine.results.attribution import AttributionReport, PartialAttribution
from dtype_engine.results.drift import Extent, ModuleDrift, PartialDrift
from dtype_engine.service import events
from dtype_engine.service.save_requests import RecipeRequest
from dtype_tui.app import DtypeApp
from dtype_tui.config.config import Config
from dtype_tui.state.first_start import is_first_start
from dtype_tui.state.tour import STEPS
from dtype_tui.tour_guide import TourPanel
from dtype_tui.widgets.module_tree import ModuleTree

pytestmark = pytest.mark.slow

SMALL = (80, 24)


async def measured(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Send the measurement of the recipe in force."""
    recipe = app.controller.experiment.recipe
    drift = (ModuleDrift("model.layers.3", 40.0, 1e-3, 0),)
    await say(app, pilot, events.Measured(recipe, report(recipe, modules=drift)), events.Idle())


def step(app: DtypeApp) -> int:
    """Return the current step of the tour, from 1, or 0 if no tour runs."""
    return app.guide.tour.index + 1 if app.guide.tour is not None else 0


async def came_to(app: DtypeApp, pilot: Pilot[None], number: int) -> None:
    await until(pilot, lambda: step(app) == number and f"Tour {number} of {len(STEPS)}" in screen(app))


async def cast_the_layers(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Do the first two steps of the tour, when the model is loaded."""
    await ready(app, pilot)
    await pilot.press(*["down"] * 4, "2")
    await measured(app, pilot)
    await pilot.press("c", "tab", "enter")
    await measured(app, pilot)
    await came_to(app, pilot, 3)


async def test_tour_leads_from_the_first_look_to_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with launched(begins_tour=True, size=SMALL) as (app, pilot):
        await ready(app, pilot)
        await came_to(app, pilot, 1)
        await pilot.press(*["down"] * 4, "l", "down", "down", "2")
        assert rules(app) == ["model.layers.1=bfloat16"]
        assert step(app) == 1, "it waits for the engine"
        await measured(app, pilot)
        await came_to(app, pilot, 2)
        await pilot.press("c", "tab", "enter")
        assert rules(app)[-1] == "model.layers.*=bfloat16"
        await measured(app, pilot)
        await came_to(app, pilot, 3)
        await pilot.press("d")
        await pilot.pause()
        assert (step(app), top(app)) == (3, "CausesScreen"), "it waits for the causes"
        await say(app, pilot, causes(app), events.Idle())
        await came_to(app, pilot, 4)
        await pilot.press("x")
        assert rules(app)[-1] == f"{DOWN}=float32"
        await measured(app, pilot)
        await came_to(app, pilot, 5)
        assert "Esc closes this window." in screen(app)
        await pilot.press("escape")
        await until(pilot, lambda: "Esc closes" not in screen(app))
        await pilot.press("H")
        await pilot.pause()
        assert "Esc closes this window." not in screen(app), "the step goes through it"
        await pilot.press("c", "j")
        assert step(app) == 5
        await pilot.press("c")
        await came_to(app, pilot, 6)
        await pilot.press("escape", "escape", "s", "enter")
        assert engine(app).commands[-1].startswith("scan ")
        await pilot.press("question_mark")
        await pilot.pause()
        assert (step(app), top(app)) == (6, "HelpScreen"), "it waits for the scan"
        await say(app, pilot, scanned(app), events.Idle())
        await came_to(app, pilot, 7)
        await pilot.press("escape", "o", "left")
        await until(pilot, lambda: app.screen.recipe is not None)  # type: ignore[attr-defined]
        assert step(app) == 7, "it waits for Enter"
        await pilot.press("enter")
        assert len(rules(app)) > 1
        await measured(app, pilot)
        await came_to(app, pilot, 8)
        assert "Esc closes this window." in screen(app)
        await pilot.press("escape", "e", "down", "enter")
        assert isinstance(engine(app).saves[-1], RecipeRequest)
        await until(pilot, lambda: "That is all." in screen(app))
        assert len(STEPS) == 8
        await pilot.press("ctrl+t")
        await pilot.pause()
        assert (step(app), len(app.query(TourPanel))) == (0, 0)


async def test_each_step_of_the_tour_waits_for_its_key() -> None:
    async with launched(begins_tour=True, size=SMALL) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("4", "question_mark")
        await pilot.pause()
        assert (rules(app), top(app), step(app)) == (["*=float64"], "HelpScreen", 1)
        assert len(app.screen.query(TourPanel)) == 1, "over a window, too"
        assert "Esc closes this window." in screen(app)
        await pilot.press("escape")
        await until(pilot, lambda: "Esc closes" not in screen(app))
        await pilot.press("l", "2")
        await measured(app, pilot)
        await came_to(app, pilot, 2)


async def test_tour_asks_again_for_a_window_that_was_closed_too_early() -> None:
    async with launched(begins_tour=True, size=SMALL) as (app, pilot):
        await ready(app, pilot)
        assert app.guide.tour is not None
        await pilot.press("2")
        await measured(app, pilot)
        app.guide.tour.index = 2
        await pilot.press("d")
        await say(app, pilot, causes(app), events.Idle())
        await came_to(app, pilot, 4)
        await pilot.press("escape")
        await came_to(app, pilot, 3)
        await pilot.press("d")
        await came_to(app, pilot, 4)
        await pilot.press("x")
        await measured(app, pilot)
        await came_to(app, pilot, 5)


async def test_tour_says_that_another_node_than_the_layers_was_cast() -> None:
    async with launched(begins_tour=True, size=SMALL) as (app, pilot):
        await ready(app, pilot)
        await pilot.press(*["down"] * 5, "2")
        assert rules(app) == ["model.norm=bfloat16"]
        await measured(app, pilot)
        await until(pilot, lambda: "That cast something else than the layers" in screen(app))
        await pilot.press("u")
        await until(pilot, lambda: "half their bytes" in " ".join(screen(app).split()))
        await pilot.press("up", "2")
        await until(pilot, lambda: "The model now runs" in screen(app))
        await measured(app, pilot)
        await came_to(app, pilot, 2)


async def test_tour_says_that_a_pattern_matches_one_node_only() -> None:
    async with launched(begins_tour=True, size=SMALL) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("2")
        await measured(app, pilot)
        await came_to(app, pilot, 2)
        await pilot.press(*["down"] * 2, "c", "enter")
        assert rules(app) == ["*=bfloat16", "model.embed_tokens=bfloat16"]
        await measured(app, pilot)
        await until(pilot, lambda: "press Tab before Enter" in " ".join(screen(app).split()))
        assert step(app) == 2, "the pattern of the rule before has a *, but it is not what was entered"
        await pilot.press("c", "tab", "enter")
        await measured(app, pilot)
        await came_to(app, pilot, 3)


async def test_tour_goes_back_when_what_a_step_needs_is_undone() -> None:
    async with launched(begins_tour=True, size=SMALL) as (app, pilot):
        await cast_the_layers(app, pilot)
        await pilot.press("u", "u")
        assert rules(app) == []
        await came_to(app, pilot, 2)
        await pilot.press("c", "tab", "enter")
        await measured(app, pilot)
        await came_to(app, pilot, 3)


async def test_tour_lets_a_module_be_put_back_while_the_others_are_measured() -> None:
    async with launched(begins_tour=True, size=SMALL) as (app, pilot):
        await cast_the_layers(app, pilot)
        await pilot.press("d")
        done = causes(app)
        assert isinstance(done, events.JobDone)
        assert isinstance(done.result, AttributionReport)
        found = PartialAttribution(dataclasses.replace(done.result, causes=done.result.causes[:1]), 1, 48)
        await say(app, pilot, events.JobGrown(done.recipe, done.ask, found))
        await came_to(app, pilot, 4)
        await pilot.press("x")
        assert rules(app)[-1].endswith("=float32")
        await measured(app, pilot)
        await came_to(app, pilot, 5)


async def test_tour_says_so_when_the_measurement_that_it_waits_for_was_stopped() -> None:
    async with launched(begins_tour=True, size=SMALL) as (app, pilot):
        await ready(app, pilot)
        await pilot.press(*["down"] * 4, "2")
        await until(pilot, lambda: "The model now runs" in screen(app))
        await say(app, pilot, events.Stopped(app.controller.experiment.recipe, "measure"), events.Idle())
        await until(pilot, lambda: "The measurement has stopped: m measures" in screen(app))
        await pilot.press("m")
        extent = Extent(done=1, total=6, positions=150, of_tokens=True)
        recipe = app.controller.experiment.recipe
        await say(app, pilot, events.OutputMeasured(recipe, RunSettings(), PartialDrift(report(recipe).output, extent)))
        await came_to(app, pilot, 2)  # the first sequence suffices


async def test_tour_accepts_a_point_of_the_front_that_was_measured_before() -> None:
    async with launched(begins_tour=True, size=SMALL) as (app, pilot):
        await ready(app, pilot)
        await say(app, pilot, scanned(app), events.Idle())
        await pilot.press("o", "left")
        await until(pilot, lambda: app.screen.recipe is not None)  # type: ignore[attr-defined]
        await pilot.press("enter")
        await measured(app, pilot)
        await pilot.press("u", "escape")
        assert app.guide.tour is not None
        app.guide.tour.index = 6
        await came_to(app, pilot, 7)
        await pilot.press("o", "left")
        await until(pilot, lambda: app.screen.recipe is not None)  # type: ignore[attr-defined]
        await pilot.press("enter")
        await came_to(app, pilot, 8)


def test_tour_takes_at_most_two_minutes_to_read() -> None:
    words = sum(len(one.words.split()) for one in STEPS)
    reading_s, keys_s, engine_s = words * 60 / 200, 2 * len(STEPS), 15
    assert reading_s + keys_s + engine_s <= 120, "at 200 words a minute and two seconds for each step's keys"


async def test_tour_can_be_quit_while_typing() -> None:
    async with launched(begins_tour=True, size=SMALL) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("colon", *"ca")
        assert "Ctrl+t leaves it" in screen(app)
        await pilot.press("ctrl+t")
        await pilot.pause()
        assert "Tour" not in screen(app)


async def test_tour_names_remapped_keys() -> None:
    keys = {"cast-node-bfloat16": "f6", "move-next": "f7", "tour": "f9"}
    async with launched(begins_tour=True, config=Config(keys=keys), size=SMALL) as (app, pilot):
        await ready(app, pilot)
        assert "Go to the layers with f7" in " ".join(screen(app).split())
        assert "f9 leaves it" in screen(app)
        assert "f6 casts them" in " ".join(screen(app).split())
        await pilot.press(*["f7"] * 4, "f6")
        assert len(rules(app)) == 1
        await measured(app, pilot)
        await came_to(app, pilot, 2)
        await pilot.press("f9")
        assert step(app) == 0


def _words_below(app: DtypeApp, row: int) -> list[str]:
    return " ".join(line.strip() for line in lines(app)[row:]).split()


@pytest.mark.parametrize("size", [(60, 15), SMALL, (120, 36)])
async def test_tour_panel_covers_neither_cursor_nor_keys(size: tuple[int, int]) -> None:
    async with launched(begins_tour=True, size=size) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("G")
        tree = app.query_one(ModuleTree)
        assert app.guide.tour is not None
        for index in range(len(STEPS)):
            app.guide.tour.index = index
            app.guide._show()
            panel, tour = app.query_one(TourPanel), app.guide.tour
            await until(pilot, lambda: _words_below(app, panel.region.y + 1) == tour.words.split(), 5)  # noqa: B023
            assert "Esc closes" not in tour.words, "no window is open"
            assert panel.region.height <= (4 if size[0] == 60 else 3)
            assert tree.region.height >= 6
            assert not panel.region.overlaps(tree.region)
            assert "? help" in screen(app)
            await until(pilot, lambda: 0 < tree.cursor - tree.scroll_offset.y + 1 < tree.region.height)


def test_texts_of_the_tour_name_existing_keys() -> None:
    app = make_app()
    for one in STEPS:
        for name in re.findall(r"\{([\w-]+)\}", one.words + one.meanwhile):
            assert app.guide.key_of(name)


@pytest.mark.parametrize(("is_demo", "said"), [(True, "Ctrl+t starts a tour"), (False, "dtype-tui tour")])
async def test_first_start_offers_the_tour(is_demo: bool, said: str) -> None:
    async with launched(is_demo=is_demo, offers_tour=True, size=SMALL) as (app, pilot):
        await ready(app, pilot)
        await until(pilot, lambda: said in " ".join(screen(app).split()))
        await pilot.press("j", "2")
        assert rules(app) == ["model=bfloat16"]
        asked = engine(app).commands[:]
        await pilot.press("escape")
        await pilot.pause()
        assert "New here?" not in screen(app)
        assert engine(app).commands == asked, "it closed the line, and stopped nothing"
        await pilot.press("ctrl+t")
        await pilot.pause()
        assert step(app) == is_demo
        assert is_demo or "dtype-tui tour" in notices(app)[-1]


def test_only_the_first_start_is_detected_as_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert [is_first_start(), is_first_start()] == [True, False]
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert not is_first_start()
