"""What the worker tells beside a measurement: the floor once, causes when asked, and that they stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from dtype_engine import Options, Recipe, Rule
from dtype_engine.checkpoint.source import locate
from dtype_engine.worker import events
from dtype_engine.worker.worker import Worker

BRAIN = Recipe((Rule("*", "bfloat16"),))


class Told:
    """A worker on the demo model, and everything that it said."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []
        self.worker = Worker(locate(None), Options(prompts=("import os\nimport sys\n",)), self.events.append)
        self.worker.start()

    def first(
        self, kind: type, matches: Callable[[events.Event], bool] = lambda event: True, since: int = 0
    ) -> events.Event:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for event in self.events[since:]:
                if isinstance(event, kind) and matches(event):
                    return event
            time.sleep(0.005)
        raise AssertionError(f"never heard {kind.__name__}")


@pytest.fixture
def told() -> Iterator[Told]:
    heard = Told()
    yield heard
    heard.worker.close()


def test_the_floor_is_told_once_and_causes_when_asked(told: Told) -> None:
    floor = told.first(events.FloorMeasured)
    told.first(events.Idle)
    told.worker.set_recipe(BRAIN)
    measured = told.first(events.Measured, lambda event: getattr(event, "recipe", None) == BRAIN)
    told.worker.causes()
    causes = told.first(events.AttributionReady)
    assert isinstance(causes, events.AttributionReady)
    assert isinstance(measured, events.Measured)
    assert causes.recipe == BRAIN
    assert causes.report.whole == pytest.approx(measured.report.output.kl_mean, rel=1e-6)
    assert [event for event in told.events if isinstance(event, events.FloorMeasured)] == [floor]


def test_causes_stop_and_the_next_question_is_answered(told: Told) -> None:
    told.first(events.FloorMeasured)
    told.worker.set_recipe(BRAIN)
    told.first(events.Measured, lambda event: getattr(event, "recipe", None) == BRAIN)
    start = len(told.events)
    told.worker.causes()
    told.first(events.WorkingProgress, since=start)
    told.worker.cancel()
    told.first(events.Stopped, since=start)
    assert not any(isinstance(event, events.AttributionReady) for event in told.events)
    told.worker.causes()
    told.first(events.AttributionReady, since=start)
