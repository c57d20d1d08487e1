"""The settings of a run: values that the command line gave are among the choices."""

from __future__ import annotations

from tests.helpers.recording_engine import engine, make_app, running
from tests.helpers.screen_text import missing

from dtype_engine.core.execution import Execution
from dtype_engine.core.options import RunSettings


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
