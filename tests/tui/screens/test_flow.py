"""The window with the implicit casts of a forward pass."""

from __future__ import annotations

import pytest
from rich.console import Console
from tests.helpers.observations import at_end, scrolled
from tests.helpers.recording_engine import launched, make_app, say
from tests.helpers.scenes import ready
from tests.helpers.screen_text import screen

from dtype_engine.results.drift import ImplicitCastStats
from dtype_engine.service import events
from dtype_engine.service.jobs import FLOW
from dtype_tui.screens.flow import MOST_ROWS, flow_screen
from dtype_tui.screens.overlay import Answer


def _shown(casts: int, text: str = "linear") -> str:
    rows = tuple(ImplicitCastStats(f"layer.{number}", text, text, "bfloat16", 10, 2, False) for number in range(casts))
    answer = Answer(rows, None, make_app().controller.experiment, 100)
    console = Console(width=90)
    with console.capture() as captured:
        console.print(flow_screen(answer)._body)
    return captured.get()


def test_long_list_of_implicit_casts_is_cut_and_the_number_of_omitted_casts_is_shown() -> None:
    assert f"layer.{MOST_ROWS - 1} " in _shown(MOST_ROWS)
    assert "more" not in _shown(MOST_ROWS)
    text = _shown(MOST_ROWS + 1005)
    assert f"layer.{MOST_ROWS} " not in text
    assert "and 1,005 more" in text


def test_overlong_names_in_the_list_of_implicit_casts_are_cut() -> None:
    assert len(_shown(2, "x" * 1_000_000)) < 5000


@pytest.mark.slow
async def test_keys_g_and_shift_g_scroll_a_window_to_its_first_and_last_line() -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        await ready(app, pilot)
        rows = tuple(ImplicitCastStats(f"layer.{at}", "linear", "float32", "bfloat16", 9, 1, False) for at in range(90))
        await say(app, pilot, events.JobDone(app.controller.experiment.recipe, FLOW.ask(None), rows), events.Idle())
        for key, last in (("G", True), ("g", False), ("greater_than_sign", True), ("less_than_sign", False)):
            await pilot.press(key)
            assert at_end(app) is last
            assert ("layer.89 " in screen(app), "layer.0 " in screen(app)) == (last, not last)
        assert scrolled(app) == 0
