"""The Memory pane shows figures of the engine that there is, and of no other."""

from __future__ import annotations

import dataclasses

import pytest
from tests.helpers.recording_engine import make_app, running, say
from tests.helpers.scenes import memory, opened, ready
from tests.helpers.screen_text import screen

from dtype_engine.service import events

OF_THE_PROCESS = ("resident", "process")


@pytest.mark.parametrize("ended", [True, False])
async def test_memory_of_the_process_is_not_shown_after_its_engine_ended(ended: bool) -> None:
    async with opened() as (app, pilot):
        assert all(label in screen(app) for label in OF_THE_PROCESS)
        if ended:
            await say(app, pilot, events.EngineEnded("the engine was killed by signal 9"))
            app.clear_notifications()
            await pilot.pause()
            assert not [label for label in OF_THE_PROCESS if label in screen(app)]
            assert "planned" in screen(app), "what is planned is still true"
        await pilot.press("R")
        await pilot.pause()
        app.clear_notifications()
        await pilot.pause()
        assert not [label for label in OF_THE_PROCESS if label in screen(app)]
        await say(app, pilot, events.Memory(app.controller.experiment.recipe, memory()))
        assert all(label in screen(app) for label in OF_THE_PROCESS)


async def test_memory_pane_shows_a_bar_for_a_device_with_a_limit() -> None:
    app = make_app()
    held = dataclasses.replace(
        memory(), resident_by_device=(("cuda:0", 3 << 30), ("cuda:1", 1 << 30)), limits=(("cuda:0", 4 << 30),)
    )
    async with running(app) as pilot:
        await ready(app, pilot)
        await say(app, pilot, events.Memory(app.controller.experiment.recipe, held))
        (line,) = [line for line in screen(app).splitlines() if "cuda:0 " in line and "of 4" in line]
        assert "cuda:0   ▄▄▄▄▄▄▁▁ 3.0 GiB of 4.0 GiB" in line
        assert "cuda:1 " not in screen(app).replace("cuda:0, cuda:1", "")
