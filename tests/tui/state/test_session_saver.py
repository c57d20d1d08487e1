"""A session that is taken up again, in the app."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.recording_engine import make_app, report
from tests.helpers.screen_text import screen, until

from dtype_engine.checkpoint.source import DEMO
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_tui.state.measurement_log import measured
from dtype_tui.state.rule_list import RuleList
from dtype_tui.state.session_store import SavedSession

MLP = Recipe((Rule("*.mlp", "float16"),))
MEASURED = measured(report(MLP), MLP, RunSettings(), 1_934_208)


async def test_what_was_measured_is_in_the_history_and_goes_back() -> None:
    rules = (RuleList(), RuleList.of([Rule("*", "bfloat16")]))
    app = make_app(saved=SavedSession(None, "demo", Path(DEMO), rule_lists=rules, at=1, measured=(MEASURED,)))
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause()
        await pilot.press("H")
        await pilot.pause()
        await until(pilot, lambda: "*.mlp" in screen(app))
        await pilot.press("enter")
        await pilot.pause()
        assert app.controller.experiment.recipe.rules == (Rule("*.mlp", "float16"),)
        await pilot.press("u")
        assert app.controller.experiment.recipe.rules == (Rule("*", "bfloat16"),)
