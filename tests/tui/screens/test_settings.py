"""The settings of a run: values that the command line gave are among the choices."""

from __future__ import annotations

import re

import pytest
from tests.helpers.recording_engine import engine, make_app, running
from tests.helpers.screen_text import is_measured, missing, screen, until
from tests.helpers.slow_net import app_on

from dtype_engine.core.execution import Execution
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_tui.state.full_rows import drift_rows


async def test_classes_dim_set_on_the_command_line_can_be_changed_in_the_app() -> None:
    app = make_app()
    app.controller.experiment.set_settings(RunSettings(classes_dim=2))
    async with running(app) as pilot:
        await pilot.press("comma", *["down"] * 4)
        assert not missing(app, "[2]", "last dim")
        await pilot.press("left", "enter")
        await pilot.pause()
        assert engine(app).settings == [RunSettings(classes_dim=-1)]


async def test_execution_of_the_candidate_is_set_and_excluded_axes_go_back_to_their_defaults() -> None:
    app = make_app()
    async with running(app) as pilot:
        await pilot.press("comma", *["up"] * 3, "right")
        assert not missing(app, "[eager]", "as loaded")
        await pilot.press("down", "right", "enter")
        await pilot.pause()
        assert engine(app).settings == [RunSettings(execution=Execution(attention="eager", batch=2))]
        await pilot.press("comma", "up", "right")
        assert not missing(app, "[one by one]", "[1]")
        await pilot.press("enter")
        await pilot.pause()
        assert engine(app).settings[-1] == RunSettings(execution=Execution(attention="eager", decode=True))


@pytest.mark.slow
async def test_acceptance_set_in_the_app_is_measured_and_shown() -> None:
    app = app_on("thread", "demo", Options(device="cpu", sequences=2), recipe=Recipe((Rule("*.mlp", "int8"),)))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: is_measured(app))
        assert "acceptance" not in screen(app)
        await pilot.press("comma", *["down"] * 5, "right", "enter")
        await until(pilot, lambda: is_measured(app) and app.controller.experiment.settings.acceptance)
        await until(pilot, lambda: re.search(r"acceptance +\d\d\.\d\d %", screen(app)))
        report = app.controller.experiment.results.report
        assert report is not None
        share = f"{100 * (report.output.acceptance or 0):.2f}"
        assert re.search(rf"acceptance +{share} %", screen(app))
        details = dict(drift_rows(app.controller.experiment))
        assert details["acceptance"].startswith(f"{share} ± ")
        await pilot.press("H")
        await until(pilot, lambda: re.search(rf"{share} %", screen(app)))
