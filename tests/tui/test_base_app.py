"""Unexpected errors in the app."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tests.helpers.recording_engine import launched, make_app, say
from tests.helpers.screen_text import until
from textual._styles_cache import StylesCache

import dtype_tui.app
from dtype_engine.cli.program import TRACEBACK
from dtype_engine.service import events
from dtype_tui.app import DtypeApp


@pytest.mark.parametrize("asked", [False, True])
async def test_unexpected_error_of_the_app_is_printed_in_one_sentence(
    asked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv(TRACEBACK, "1") if asked else monkeypatch.delenv(TRACEBACK, raising=False)
    app = make_app()
    app.error_console = Console(file=io.StringIO(), width=400)

    def fail() -> None:
        raise ScreenlessError("no screen\x1b[2J")

    with pytest.raises(ScreenlessError):
        await failing(app, fail)
    assert app.return_code == 1
    app._print_error_renderables()
    said = app.error_console.file.getvalue()  # type: ignore[attr-defined]
    assert "ScreenlessError" in said
    assert ("in fail" in said) is asked
    if not asked:
        assert said.count("\n") == 1
        assert "\x1b" not in said
        assert said.startswith("dtype-tui: unexpected ScreenlessError: no screen")


@pytest.mark.slow
async def test_drawings_of_a_closed_window_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    drawings: weakref.WeakSet[StylesCache] = weakref.WeakSet()
    made = StylesCache.__init__
    monkeypatch.setattr(StylesCache, "__init__", lambda drawing: (drawings.add(drawing), made(drawing))[1])
    gc.freeze()  # what the test run has imported: collections would go through all of it
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("question_mark", "escape")
        gc.collect()
        before = len(drawings)
        for _ in range(5):
            await pilot.press("question_mark", "escape")
        gc.collect()
        assert len(drawings) <= before + 2


async def test_garbage_collection_is_enabled_if_the_engine_ends_early() -> None:
    async with launched() as (app, pilot):
        assert not gc.isenabled()
        await say(app, pilot, events.EngineEnded("it was killed"))
        assert gc.isenabled()


@pytest.mark.slow
async def test_garbage_collection_is_enabled_after_a_while_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype_tui.app, "LONGEST_WITHOUT_GC_S", 0.05)
    async with launched() as (_, pilot):
        await until(pilot, gc.isenabled)


async def failing(app: DtypeApp, fail: Callable[[], None]) -> None:
    """Run the app until it has called `fail`."""
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause()
        app.call_later(fail)
        await pilot.pause()


class ScreenlessError(Exception):
    """An unexpected error."""
