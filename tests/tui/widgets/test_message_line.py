"""What the app says: in a line of its own, and kept. `test_snapshots.py` has a message in every scene: it covers nothing."""

from __future__ import annotations

import pytest
from tests.helpers.recording_engine import make_app, running
from tests.helpers.scenes import opened
from tests.helpers.screen_text import lines, notices, screen

from dtype_tui import base_app
from dtype_tui.config.config import Config
from dtype_tui.widgets.message_line import MessageLine


async def test_message_stays_until_a_key_is_pressed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(size=(80, 24)) as (app, pilot):
        await pilot.press("u")
        assert "nothing left to undo" in screen(app)
        await pilot.press("j")
        assert "nothing left to undo" in screen(app)
        monkeypatch.setattr(base_app, "READ_S", -1.0)
        await pilot.press("j")
        await pilot.pause()
        assert "nothing left to undo" not in screen(app)
        await pilot.press("M")
        await pilot.pause()
        assert "nothing left to undo" in screen(app), "it can be read again"


async def test_long_path_in_a_message_is_shown_completely() -> None:
    async with opened() as (app, pilot):
        path = "/home/somebody/models-of-last-week/mixed-precision/SmolLM2-135M-Instruct.recipe-2.yaml"
        app.main.say(f"wrote {path}: 3 rules", "information")
        await pilot.pause()
        assert path in "".join(line[81:].strip() for line in lines(app)[-8:])


@pytest.mark.parametrize("key", ["e", "s"])
async def test_message_is_shown_in_a_window_that_opens_after_it(key: str) -> None:
    async with opened(size=(80, 24)) as (app, pilot):
        await pilot.press("2", "2", key)
        await pilot.pause()
        await pilot.pause()
        said = notices(app)[-1]
        assert said == "the model is bfloat16 already"
        assert str(app.screen.query_one(MessageLine).content) == said


@pytest.mark.slow
@pytest.mark.parametrize(("key", "quits"), [(None, "q quits"), ("f10", "f10 quits"), ("q,ctrl+x", "q or Ctrl+x quits")])
async def test_ctrl_c_names_the_key_that_quits(key: str | None, quits: str) -> None:
    async with opened(size=(80, 24), config=Config(keys={"quit": key} if key else {})) as (app, pilot):
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert notices(app) == [quits]
        assert quits in screen(app)
        await pilot.press("c", "ctrl+c")
        await pilot.pause()
        assert notices(app)[1:] == [f"Esc closes the line, then {quits}"], "q would be typed"


async def test_number_of_messages_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_app, "MOST_MESSAGES", 3)
    app = make_app()
    async with running(app) as pilot:
        for number in range(9):
            app.notify(f"number {number}")
            await pilot.pause()
        assert [each.message for each in app.messages] == ["number 6", "number 7", "number 8"]


async def test_messages_during_exit_do_not_change_the_exit() -> None:
    async with opened(size=(80, 24)) as (app, pilot):
        await pilot.press("M")
        app.exit(return_code=143)
        app.main.say("too late", "warning")
        await pilot.pause()
    assert app.return_code == 143
