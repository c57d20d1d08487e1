"""What the worker emits beside a measurement: the floor once, the attribution when asked, and that it stops."""

from __future__ import annotations

import pytest
from tests.helpers.recorded_worker import RecordedEngine

from dtype_engine import Recipe, Rule
from dtype_engine.service import events
from dtype_engine.service.commands import Cancel, SetRecipe
from dtype_engine.service.jobs import CAUSES, FLOOR

BRAIN = Recipe((Rule("*", "bfloat16"),))


def test_noise_floor_is_reported_once_and_causes_on_request(short: RecordedEngine) -> None:
    floor = short.answer(FLOOR)
    short.wait_for(events.Idle)
    short.worker.request(SetRecipe(BRAIN))
    measured = short.measured(BRAIN)
    short.worker.request(CAUSES.ask(None))
    causes = short.answer(CAUSES)
    assert causes.whole == pytest.approx(measured.report.output.kl_mean, rel=1e-6)
    assert short.answers(FLOOR) == [floor]
    told = short.of(events.JobGrown)
    assert {event.recipe for event in (*told, *short.of(events.JobDone)) if event.ask == CAUSES.ask(None)} == {BRAIN}
    parts = [part for event in told if (part := events.partial_of(event, CAUSES)) is not None]
    assert parts
    assert all(set(part.report.causes) <= set(causes.causes) for part in parts)


def test_cancelled_causes_do_not_block_the_next_request(short: RecordedEngine) -> None:
    short.answer(FLOOR)
    short.worker.request(SetRecipe(BRAIN))
    short.measured(BRAIN)
    start = len(short.events)
    short.worker.request(CAUSES.ask(None))
    short.wait_for(events.WorkingProgress, lambda event: event.what.startswith("running each module"), start)
    short.worker.request(Cancel())
    assert short.wait_for(events.Stopped, since=start).job == "causes"
    assert not short.answers(CAUSES)
    short.worker.request(CAUSES.ask(None))
    short.answer(CAUSES, start)
