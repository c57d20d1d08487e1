"""A window that is asked twice to close closes once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rich.color import Color
from tests.helpers.recording_engine import launched, make_app, model_ready, report, running, say
from tests.helpers.scenes import mixed
from tests.helpers.screen_text import notices, screen, until
from textual._context import active_message_pump
from textual.command import CommandList
from textual.css.query import NoMatches
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import OptionList

from dtype_engine.recipe import Recipe
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.screens.engine_event import EngineEvent
from dtype_tui.screens.save import SaveScreen

WINDOW_KEYS = ("question_mark", "enter", "comma", "p", "e", "s", "H", "d", "i", "ctrl+p")


@pytest.mark.slow
async def test_main_screen_stays_open_if_a_window_is_closed_twice() -> None:
    app = make_app()
    recipe = app.controller.experiment.recipe
    async with running(app, (80, 24)) as pilot:
        await say(app, pilot, model_ready(app))
        for key in WINDOW_KEYS:
            await say(app, pilot, events.Measured(recipe, report(recipe)))
            await pilot.press(key)
            await pilot.pause()
            window = app.screen
            assert isinstance(window, ModalScreen), key
            for _ in range(3):  # before any of them is looked at, as they come from a terminal in one write
                app.post_message(Key("escape", None))
            await until(pilot, lambda: len(app.screen_stack) == 1)
            assert app.screen is app.screen_stack[0]
            assert len(app.screen_stack) == 1
            window.dismiss(None)
            await pilot.press("2")
            assert len(app.controller.experiment.recipe) == 1, key
            await pilot.press("u")
            assert app.controller.experiment.recipe == recipe


@pytest.mark.slow
async def test_two_keys_received_at_once_open_only_one_window() -> None:
    """The second key goes to the window, although it was pressed before the window was there."""
    app = make_app()
    recipe = app.controller.experiment.recipe
    async with running(app, (80, 24)) as pilot:
        await say(app, pilot, model_ready(app), events.Measured(recipe, report(recipe)))
        pairs = (
            (first, second) for first in WINDOW_KEYS for second in dict.fromkeys((first, "d", "e", "question_mark"))
        )
        for first, second in pairs:
            for key in (first, second):
                app.post_message(Key(key, key if len(key) == 1 else None))
            for _ in range(3):
                await pilot.pause()
            assert len(app.screen_stack) <= 2, (first, second)
            while len(app.screen_stack) > 1:
                await pilot.press("escape")


@pytest.mark.slow
async def test_pending_events_of_a_closed_window_raise_no_error() -> None:
    """The window is opened and closed in one burst, so that its mount event, its workers and the engine's answers arrive after it
    is closed.
    """
    async with launched() as (app, pilot):
        for window in ("p", "e", "ctrl+p", "i", "d", "s", "comma"):
            for _ in range(3):
                app.post_message(Key(window, window if len(window) == 1 else None))
                app.post_message(Key("escape", None))
            await until(pilot, lambda: len(app.screen_stack) == 1)
            await pilot.pause()
        assert app.is_running
        assert app.return_code is None


async def test_export_plan_that_arrives_before_the_save_window_is_drawn_is_shown() -> None:
    async with launched() as (app, pilot):
        window = SaveScreen(app.controller)
        app.push_screen(window)
        window.post_message(EngineEvent(events.ExportPlanned(Recipe(), None, "it can not be exported")))
        await until(pilot, lambda: "it can not be exported" in screen(app))


def cells(app: DtypeApp) -> list[list[tuple[str, float]]]:
    """Each cell of the screen: its character, and how far its color is from its background."""
    rows = []
    for strip in app.screen._compositor.render_strips():
        row: list[tuple[str, float]] = []
        for text, style, _ in strip:
            colours = [(style and each) or Color.default() for each in (style and style.color, style and style.bgcolor)]
            one, other = (each.get_truecolor(app.ansi_theme, foreground=not at) for at, each in enumerate(colours))
            row += [(character, math.dist(one, other)) for character in text]
        rows.append(row)
    return rows


@pytest.mark.parametrize("key", ["p", "comma", "J"])
async def test_main_screen_behind_a_window_is_dimmed(key: str) -> None:
    async with launched(size=(120, 36)) as (app, pilot):
        await mixed(app, pilot)
        before = cells(app)
        await pilot.press(key)
        await pilot.pause()
        after, box = cells(app), next(iter(app.screen.children)).region
        parts = set()
        for y, (row, dimmed) in enumerate(zip(before, after, strict=True)):
            for x, ((character, contrast), (shown, left)) in enumerate(zip(row, dimmed, strict=True)):
                if box.contains(x, y) or character == " ":
                    continue
                assert shown == character
                assert left < 0.75 * contrast, (x, y, character)
                parts.add((x // 40, y // 12))
        assert {(0, 0), (2, 0), (0, 2), (2, 2)} <= parts, "all corners of the screen"


async def look_for_nothing(closed: bool) -> None:
    """Let the app query a widget that does not exist in a window. closed: whether the window is closed by then."""
    async with launched() as (app, pilot):
        await pilot.press("p")
        window = app.screen
        if closed:
            await pilot.press("escape")
        app.call_later(lambda: window.query_one("#nowhere"))
        await pilot.pause()
        await pilot.press("2")
        assert len(app.controller.experiment.recipe) == closed


async def test_widget_query_that_finds_nothing_raises_only_while_its_window_is_open() -> None:
    await look_for_nothing(closed=True)
    with pytest.raises(NoMatches):
        await look_for_nothing(closed=False)


async def test_error_in_the_command_palette_closes_only_the_palette(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    async with launched() as (app, pilot):
        await pilot.press("ctrl+p")
        await until(pilot, lambda: app.screen.query(OptionList))
        listed = app.screen.query_one(OptionList)
        before = active_message_pump.set(listed)  # as in its own loop
        app._handle_exception(IndexError("list index out of range"))
        active_message_pump.reset(before)
        await until(pilot, lambda: len(app.screen_stack) == 1 and notices(app))
        assert "the palette was closed: unexpected IndexError" in notices(app)[-1]
        await pilot.press("2")
        assert len(app.controller.experiment.recipe) == 1
    assert len(list(tmp_path.glob("dtype-tui/error-*.log"))) == 1


async def test_error_in_the_search_of_the_command_palette_closes_only_the_palette(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The search runs in a worker, whose error arrives wrapped. Such an error, of a list that was gone, once ended the program."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    async with launched() as (app, pilot):
        await pilot.press("ctrl+p")
        await until(pilot, lambda: app.screen.query(CommandList))
        palette = app.screen

        async def search() -> None:
            palette.query_one("#nowhere")

        app.run_worker(search())
        await until(pilot, lambda: len(app.screen_stack) == 1 and notices(app))
        assert "the palette was closed: unexpected NoMatches" in notices(app)[-1]
        await pilot.press("2")
        assert len(app.controller.experiment.recipe) == 1
