"""A session that is taken up again, in the app."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.helpers.recording_engine import launched, make_app, report
from tests.helpers.screen_text import screen, until

from dtype_engine.checkpoint.source import DEMO
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_tui.state.measurement_log import measured
from dtype_tui.state.rule_list import RuleList
from dtype_tui.state.session_saver import SessionSaver
from dtype_tui.state.session_store import SavedSession

MLP = Recipe((Rule("*.mlp", "float16"),))
MEASURED = measured(report(MLP), MLP, RunSettings(), 1_934_208)


async def test_resumed_session_restores_measurements_to_the_history() -> None:
    rules = (RuleList(), RuleList.of([Rule("*", "bfloat16")]))
    async with launched(saved=SavedSession(None, "demo", Path(DEMO), rule_lists=rules, at=1, measured=(MEASURED,))) as (
        app,
        pilot,
    ):
        await pilot.press("H")
        await pilot.pause()
        await until(pilot, lambda: "*.mlp" in screen(app))
        await pilot.press("enter")
        await pilot.pause()
        assert app.controller.experiment.recipe.rules == (Rule("*.mlp", "float16"),)
        await pilot.press("u")
        assert app.controller.experiment.recipe.rules == (Rule("*", "bfloat16"),)


def test_signal_during_any_line_of_an_update_still_saves_the_session() -> None:
    """A signal handler may run between any two lines of the app; it saves and closes the session."""
    experiment = make_app().controller.experiment
    reached = 0
    for interrupted in range(100):
        saver = SessionSaver("demo", "demo", DEMO, Options())
        lines = 0

        def trace(frame: FrameType, event: str, _: object, saver: SessionSaver = saver, at: int = interrupted) -> Any:
            nonlocal lines
            if frame.f_code is not SessionSaver.update.__code__:
                return None
            lines += event == "line"
            if lines == at + 1:
                sys.settrace(None)
                saver.update(experiment, "model")
                saver.close()
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        saver.update(experiment, "model")
        sys.settrace(before)
        if lines <= interrupted:
            saver.close()
            break
        reached += 1
        assert saver._file.path is not None
        assert saver._file.path.exists(), f"at line {interrupted} of update"
    assert reached > 5
