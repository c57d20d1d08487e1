"""What the worker emits beside a measurement: the floor once, the attribution when asked, and that it stops."""

from __future__ import annotations

import pytest
from tests.helpers.recorded_worker import RecordedEngine

from dtype_engine import Recipe, Rule
from dtype_engine.worker import events
from dtype_engine.worker.commands import AttributeDrift, Cancel, SetRecipe

BRAIN = Recipe((Rule("*", "bfloat16"),))


def test_noise_floor_is_reported_once_and_causes_on_request(short: RecordedEngine) -> None:
    floor = short.wait_for(events.NoiseFloorMeasured)
    short.wait_for(events.Idle)
    short.worker.request(SetRecipe(BRAIN))
    measured = short.measured(BRAIN)
    short.worker.request(AttributeDrift())
    causes = short.wait_for(events.AttributionReady)
    assert causes.recipe == BRAIN
    assert causes.report.whole == pytest.approx(measured.report.output.kl_mean, rel=1e-6)
    assert short.of(events.NoiseFloorMeasured) == [floor]
    told = short.of(events.AttributionGrown)
    assert told
    assert all(one.recipe == BRAIN and set(one.found.report.causes) <= set(causes.report.causes) for one in told)


def test_cancelled_causes_do_not_block_the_next_request(short: RecordedEngine) -> None:
    short.wait_for(events.NoiseFloorMeasured)
    short.worker.request(SetRecipe(BRAIN))
    short.measured(BRAIN)
    start = len(short.events)
    short.worker.request(AttributeDrift())
    short.wait_for(events.WorkingProgress, lambda event: event.what.startswith("running each module"), start)
    short.worker.request(Cancel())
    assert short.wait_for(events.Stopped, since=start).job == "causes"
    assert not short.of(events.AttributionReady)
    short.worker.request(AttributeDrift())
    short.wait_for(events.AttributionReady, since=start)
