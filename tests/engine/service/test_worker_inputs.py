"""New inputs while the worker works: they replace earlier ones, may be refused, and are kept with a new recipe."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.recorded_worker import RecordedEngine, Way

from dtype_engine import Options, Recipe, Rule
from dtype_engine.service import events
from dtype_engine.service.commands import SetInputs, SetRecipe

HALF = Recipe((Rule("*", "float16"),))
BRAIN = Recipe((Rule("*", "bfloat16"),))


def measured(recorded: RecordedEngine, words: str, since: int = 0) -> events.Measured:
    """Return the first measurement with inputs of this description."""
    return recorded.wait_for(events.Measured, lambda event: event.report.inputs.startswith(words), since)


def test_inputs_are_reported_when_the_model_is_ready(demo: RecordedEngine) -> None:
    demo.wait_for(events.InputsReady)
    kinds = [type(event) for event in demo.events]
    assert kinds.index(events.ModelReady) + 1 == kinds.index(events.InputsReady)


def test_new_inputs_supersede_a_measurement_and_older_inputs(demo: RecordedEngine) -> None:
    demo.wait_for(events.ModelReady)
    demo.worker.request(SetRecipe(BRAIN))
    for word in ("one", "two", "three"):
        demo.worker.request(SetInputs(f"import {word}"))
    demo.wait_for(events.InputsReady, lambda event: "three" in event.summary.batches[0].what)
    assert measured(demo, "1 sequence of your prompts").recipe == BRAIN
    start = len(demo.events)
    demo.worker.request(SetInputs(""))
    assert measured(demo, "6 default prompts", start).recipe == BRAIN


def test_refused_inputs_are_reported_without_a_new_measurement(demo: RecordedEngine) -> None:
    demo.wait_for(events.Idle)
    start = len(demo.events)
    demo.worker.request(SetInputs("nowhere.png"))
    said = demo.wait_for(events.InputsRefused, since=start)
    assert said == events.InputsRefused("there is no file nowhere.png")
    demo.wait_for(events.Idle, since=start)
    assert not any(isinstance(event, events.Measured | events.InputsReady) for event in demo.events[start:])


def test_measurement_stopped_by_refused_inputs_starts_again(demo: RecordedEngine) -> None:
    demo.wait_for(events.Idle)
    start = len(demo.events)
    demo.worker.request(SetRecipe(HALF))
    demo.worker.request(SetInputs("nowhere.png"))
    demo.wait_for(events.InputsRefused, since=start)
    assert measured(demo, "6 default prompts", start).recipe == HALF


def test_inputs_are_used_although_a_recipe_follows_at_once(demo: RecordedEngine) -> None:
    demo.wait_for(events.Idle)
    demo.worker.request(SetInputs("import os\n" * 200))
    demo.worker.request(SetRecipe(HALF))
    demo.worker.request(SetRecipe(BRAIN))
    demo.wait_for(events.Measured, lambda event: event.recipe == BRAIN and "your prompts" in event.report.inputs)


def test_model_with_unsuitable_inputs_is_opened_with_default_inputs(tmp_path: Path, way: Way) -> None:
    (tmp_path / "cat.png").write_bytes(b"never looked at")
    with RecordedEngine(way, options=Options(images=(tmp_path / "cat.png",))) as recorded:
        assert "accepts no pictures" in recorded.wait_for(events.InputsRefused).message
        assert measured(recorded, "6 default prompts").report.output.max_abs == 0
