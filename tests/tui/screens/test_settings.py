"""The settings of a run: values that the command line gave are among the choices."""

from __future__ import annotations

from tests.helpers.recording_engine import engine, make_app, running
from tests.helpers.screen_text import missing

from dtype_engine.core.options import RunSettings


async def test_classes_dim_set_on_the_command_line_can_be_changed_in_the_app() -> None:
    app = make_app()
    app.controller.experiment.set_settings(RunSettings(classes_dim=2))
    async with running(app) as pilot:
        await pilot.press("comma", "up")
        assert not missing(app, "[2]", "last dim")
        await pilot.press("left", "enter")
        await pilot.pause()
        assert engine(app).settings == [RunSettings(classes_dim=-1)]
