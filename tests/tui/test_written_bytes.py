"""How many bytes the app writes to the terminal: each takes its time on a slow line."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from tests.helpers.recording_engine import make_app, report, say
from tests.helpers.scenes import MIXED, mixed, modules
from textual.drivers.headless_driver import HeadlessDriver

from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.process.short_frames import ShownCells
from dtype_tui.widgets.module_tree import ModuleTree


def better(drift: ModuleDrift, decibels: float) -> ModuleDrift:
    return dataclasses.replace(drift, sqnr_db=(drift.sqnr_db or 0) + decibels)


async def say_recipe(app: DtypeApp, recipe: Recipe) -> None:
    app.controller.apply_recipe(recipe)


@pytest.mark.slow
async def test_app_writes_few_bytes_to_the_terminal_for_results_and_cursor_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []
    monkeypatch.setenv("COLORTERM", "truecolor")
    cells = ShownCells()  # the headless driver writes all
    monkeypatch.setattr(HeadlessDriver, "write", lambda driver, data: written.append(cells.shortened(data)))
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await mixed(app, pilot)
        app.query_one(ModuleTree).go_to("model.layers.4.mlp")
        await pilot.pause()
        monkeypatch.setattr(DtypeApp, "is_headless", False)  # what is not drawn is not written
        app.refresh()
        await pilot.pause()

        async def bytes_of(change: Callable[[], Awaitable[object]]) -> int:
            written.clear()
            await change()
            await pilot.pause(0.15)  # a clock collects what the engine tells
            return sum(len(each.encode()) for each in written)

        async def read(recipe: Recipe, decibels: float, rest: float) -> int:
            app.controller.apply_recipe(recipe)
            await pilot.pause(0.15)
            found = tuple(better(each, decibels if "layers.5" in each.name else rest) for each in modules())
            measured = events.Measured(recipe, report(recipe, 1.2e-2, found))
            return await bytes_of(lambda: say(app, pilot, measured, events.Idle()))

        fewer = Recipe((*MIXED.rules, Rule("model.layers.5", "float32")))
        assert 0 < await read(fewer, 2.0, 0.0) < 3000, "other rows, and figures where there were none"
        assert 0 < await read(MIXED, 0.7, 0.7) < 1300, "every module has another figure"
        assert 0 < await bytes_of(lambda: say_recipe(app, fewer)) < 3000
        for key, most in (("j", 600), ("k", 600), ("pagedown", 1000), ("pageup", 1000)):
            assert 0 < await bytes_of(partial(pilot.press, key)) < most
        monkeypatch.undo()
