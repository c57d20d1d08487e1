"""Other inputs while the worker works: they supersede, they are refused, they survive a new recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.worker.test_worker import BRAIN, HALF, Heard

from dtype_engine import Options
from dtype_engine.checkpoint.source import locate
from dtype_engine.worker import events


@pytest.fixture
def demo() -> Iterator[Heard]:
    heard = Heard(locate(None))
    yield heard
    heard.worker.close()


def measured(heard: Heard, words: str, seen: int = 0) -> events.Measured:
    found = heard.wait_for(
        lambda event: isinstance(event, events.Measured) and event.report.inputs.startswith(words), seen
    )
    assert isinstance(found, events.Measured)
    return found


def test_the_inputs_are_told_when_the_model_is_ready(demo: Heard) -> None:
    demo.wait_for(lambda event: isinstance(event, events.InputsReady))
    kinds = [type(event) for event in demo.events]
    assert kinds.index(events.ModelReady) + 1 == kinds.index(events.InputsReady)


def test_new_inputs_supersede_a_measurement_and_older_ones(demo: Heard) -> None:
    demo.wait_for(lambda event: isinstance(event, events.ModelReady))
    demo.worker.set_recipe(BRAIN)
    for word in ("one", "two", "three"):
        demo.worker.set_inputs(f"import {word}")
    demo.wait_for(lambda event: isinstance(event, events.InputsReady) and "three" in event.reading.batches[0].what)
    assert measured(demo, "1 sequence of your prompts").recipe == BRAIN
    start = len(demo.events)
    demo.worker.set_inputs("")
    assert measured(demo, "6 default prompts", start).recipe == BRAIN


def test_refused_inputs_leave_everything_as_it_is(demo: Heard) -> None:
    demo.wait_for(lambda event: isinstance(event, events.Idle))
    start = len(demo.events)
    demo.worker.set_inputs("nowhere.png")
    said = demo.wait_for(lambda event: isinstance(event, events.InputsRefused), start)
    assert said == events.InputsRefused("there is no file nowhere.png")
    demo.wait_for(lambda event: isinstance(event, events.Idle), start)
    assert not any(isinstance(event, events.Measured | events.InputsReady) for event in demo.events[start:])


def test_a_measurement_that_refused_inputs_stopped_begins_again(demo: Heard) -> None:
    demo.wait_for(lambda event: isinstance(event, events.Idle))
    start = len(demo.events)
    demo.worker.set_recipe(HALF)
    demo.worker.set_inputs("nowhere.png")
    demo.wait_for(lambda event: isinstance(event, events.InputsRefused), start)
    assert measured(demo, "6 default prompts", start).recipe == HALF


def test_inputs_survive_a_recipe_that_comes_right_after_them(demo: Heard) -> None:
    demo.wait_for(lambda event: isinstance(event, events.Idle))
    demo.worker.set_inputs("import os\n" * 200)
    demo.worker.set_recipe(HALF)
    demo.worker.set_recipe(BRAIN)
    found = demo.wait_for(
        lambda event: (
            isinstance(event, events.Measured) and event.recipe == BRAIN and "your prompts" in event.report.inputs
        )
    )
    assert isinstance(found, events.Measured)


def test_inputs_that_do_not_fit_at_opening_give_way_to_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"never looked at")
    heard = Heard(locate(None), Options(images=(tmp_path / "cat.png",)))
    try:
        said = heard.wait_for(lambda event: isinstance(event, events.InputsRefused))
        assert isinstance(said, events.InputsRefused)
        assert "takes no pictures" in said.message
        assert measured(heard, "6 default prompts").report.output.max_abs == 0
    finally:
        heard.worker.close()
