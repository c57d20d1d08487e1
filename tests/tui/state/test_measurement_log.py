"""The history of measured recipes."""

from __future__ import annotations

import dataclasses

import pytest
from tests.helpers.recording_engine import report

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.drift import Seconds
from dtype_tui.state import measurement_log
from dtype_tui.state.measurement_log import MeasuredRecipe, ModuleLog, measured, remember, toggle_pin, without_figures

BF16 = Recipe((Rule("*", "bfloat16"),))
F16 = Recipe((Rule("*", "float16"),))


def test_history_has_one_entry_per_recipe_and_keeps_its_pin_and_time() -> None:
    history: tuple[MeasuredRecipe, ...] = ()
    history = toggle_pin(remember(history, measured(report(BF16), BF16, RunSettings(), 100)), 0)
    history = remember(history, measured(report(F16), F16, RunSettings(), 100))
    reused = dataclasses.replace(report(BF16), seconds=Seconds(0.1, 0.05, reused=True))
    history = remember(history, measured(reused, BF16, RunSettings(), 100))
    assert [(entry.recipe, entry.pinned, entry.seconds) for entry in history] == [(BF16, True, 0.2), (F16, False, 0.2)]


def test_history_has_separate_entries_for_other_run_settings() -> None:
    autocast = RunSettings(autocast="bfloat16")
    history = remember((), measured(report(BF16), BF16, RunSettings(), 100))
    history = remember(history, measured(report(BF16), BF16, autocast, 100))
    history = remember(history, measured(report(F16), F16, RunSettings(), 100))
    assert len(history) == 3
    assert without_figures(history, autocast, "prompts") == [F16]
    assert without_figures(history, RunSettings(), "other prompts") == [BF16, F16]


def test_history_is_limited_and_pinned_entries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_log, "MOST_MEASURED", 10)
    recipes = [Recipe((Rule(f"layer.{number}", "float16"),)) for number in range(30)]
    history: tuple[MeasuredRecipe, ...] = ()
    modules = ModuleLog()
    for number, recipe in enumerate(recipes):
        entry = measured(report(recipe), recipe, RunSettings(), 100)
        history = remember(history, entry)
        modules.keep(entry, ())
        if number == 3:
            history = toggle_pin(history, 3)
    assert [entry.recipe for entry in history] == [recipes[3], *recipes[-9:]]
    assert sum(modules.of(measured(report(recipe), recipe, RunSettings(), 100)) is not None for recipe in recipes) == 10
