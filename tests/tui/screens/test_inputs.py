"""The inputs screen: what it shows, and other inputs through a real worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console
from tests.helpers.recording_engine import engine, make_app, report, say
from tests.helpers.screen_text import missing, screen, until
from tests.helpers.slow_net import app_on
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.widgets import Input

from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.inputs import InputBatch, InputsSummary, InputTensor
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.screens.inputs import MOST_ROWS, InputsScreen, inputs_table

PICTURE = InputBatch(
    "cat.png, 640 x 480: a picture of",
    3,
    (InputTensor("pixel_values", (1, 3, 32, 32), "float32"), InputTensor("input_ids", (1, 3), "int64")),
)
READING = InputsSummary("your picture cat.png", ("pictures: your files", "text: yours"), 3, (PICTURE,))


@asynccontextmanager
async def opened(
    size: tuple[int, int] = (120, 36), reading: InputsSummary = READING
) -> AsyncIterator[tuple[DtypeApp, Pilot[None]]]:
    """The app with the inputs on the screen, and an engine that only notes."""
    app = make_app()
    async with app.run_test(size=size) as pilot:
        ready = events.ModelReady(app.controller.experiment.tree, "Blip", "cpu", 1.0, reading.description, ())
        await say(app, pilot, ready, events.InputsReady(reading), events.Idle())
        await pilot.press("i")
        await pilot.pause()
        yield app, pilot


@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_inputs_window_has_a_row_for_each_input_with_its_tensors(size: tuple[int, int]) -> None:
    async with opened(size) as (app, _):
        assert isinstance(app.screen, InputsScreen)
        assert not missing(app, "your picture cat.png", "pictures: your files", "text: yours", "3 tokens")
        assert not missing(app, "cat.png, 640 x 480: a picture of", "pixel_values 1×3×32×32 f32", "input_ids 1×3 i64")
        assert app.screen.query_one(Input).has_focus


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (60, 15)])
@pytest.mark.slow
async def test_inputs_window_scrolls_many_inputs_and_keeps_the_prompt_visible(size: tuple[int, int]) -> None:
    many = InputsSummary("many", ("text: yours",), None, (PICTURE,) * (MOST_ROWS + 5))
    async with opened(size, many) as (app, pilot):
        line = app.screen.query_one(Input)
        assert 0 < line.region.y < size[1] - 1
        assert "and 5 more" not in screen(app)
        rows = app.screen.query_one(VerticalScroll)
        await pilot.press("pagedown", "down")
        assert rows.scroll_y == 9
        rows.scroll_end(animate=False)
        await pilot.pause()
        await until(pilot, lambda: "and 5 more" in screen(app))
        assert line.has_focus


async def test_enter_in_the_inputs_window_requests_the_typed_inputs() -> None:
    async with opened() as (app, pilot):
        await pilot.press(*"dog", "space", *"q", "enter")
        assert engine(app).lines == ["dog q"]
        assert "preparing" in screen(app)
        await say(app, pilot, events.InputsRefused("there is no dog"))
        assert "Refused: the inputs above stay in use" in screen(app)
        assert screen(app).count("there is no dog") == 1, "an error is told once"
        assert app.screen.query_one(Input).value == "dog q", "it stays to be mended"
        other = InputsSummary("1 sequence of your prompts", ("your prompt",), 7, (InputBatch("dog", 7, ()),))
        await say(app, pilot, events.InputsReady(other))
        assert "1 sequence of your prompts" in screen(app)
        assert app.screen.query_one(Input).value == ""
        assert app.controller.experiment.model.inputs == "1 sequence of your prompts"
        await say(app, pilot, events.Measured(Recipe(), report(Recipe())))
        assert "outputs compared at 973" in screen(app)
        await pilot.press("escape")
        await pilot.pause()
        assert not isinstance(app.screen, InputsScreen)


async def test_drift_on_earlier_inputs_is_not_shown_after_new_inputs() -> None:
    async with opened() as (app, pilot):
        await say(app, pilot, events.Measured(Recipe(), report(Recipe())))
        assert app.controller.experiment.results.report is not None
        await say(app, pilot, events.InputsReady(READING))
        assert app.controller.experiment.results.report is None


async def test_inputs_key_says_that_the_model_is_not_ready() -> None:
    app = make_app()
    async with app.run_test() as pilot:
        await pilot.press("i")
        assert not isinstance(app.screen, InputsScreen)
        assert "known when the model is loaded" in next(iter(app._notifications)).message


async def test_names_of_input_files_are_escaped() -> None:
    row = InputBatch("[red]a[/red]\x1b[2Jb.png", None, ())
    async with opened(reading=InputsSummary("[b]x[/b]", ("[i]y[/i]",), None, (row,))) as (app, _):
        assert not missing(app, "[red]a[/red]\\x1b[2Jb.png", "[b]x[/b]", "[i]y[/i]")


@pytest.mark.slow
async def test_typed_prompt_is_measured_and_an_invalid_input_file_keeps_the_inputs(tmp_path: Path) -> None:
    app = app_on("thread", "demo", recipe=Recipe((Rule("*", "bfloat16"),)))
    (tmp_path / "wrong.pt").write_bytes(b"no tensors")
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: app.controller.experiment.results.report is not None)
        before = app.controller.experiment.results.report
        await pilot.press("i")
        await pilot.press(*"import os", "enter")
        assert before is not None
        await until(pilot, lambda: (now := app.controller.experiment.results.report) and now.inputs != before.inputs)
        after = app.controller.experiment.results.report
        assert after is not None
        assert after.inputs.startswith("1 sequence of your prompts")
        assert after.output.positions is not None
        await until(pilot, lambda: f"outputs compared at {after.output.positions}" in screen(app))
        app.screen.query_one(Input).value = str(tmp_path / "wrong.pt")
        await pilot.press("enter")
        await until(pilot, lambda: "stay in use" in screen(app))
        assert app.controller.experiment.results.report is after
        assert app.controller.experiment.model.inputs == after.inputs


def test_overlong_dtypes_and_shapes_of_inputs_are_cut() -> None:
    """The texts come from an engine, which may be on another machine."""
    batch = InputBatch("text", 3, (InputTensor("ids", (7,) * 100_000, "x" * 1_000_000),))
    console = Console(width=80)
    with console.capture() as shown:
        console.print(inputs_table(InputsSummary("two", ("text: yours",), 3, (batch, batch))))
    assert len(shown.get()) < 5000
