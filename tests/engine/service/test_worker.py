from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from tests.helpers.recorded_worker import RecordedEngine, RecordedWorker, Way

from dtype_engine import Options, Recipe, Rule, RunSettings
from dtype_engine.service import events
from dtype_engine.service.commands import Cancel, Measure, Pause, Scan, SetRecipe, SetSettings
from dtype_engine.service.jobs import CAUSES, CHECK, FLOOR, FLOW, GENERATE, SPEED, TOKENS, GenerateText
from dtype_engine.service.worker import NICENESS

HALF = Recipe((Rule("*", "float16"),))
BRAIN = Recipe((Rule("*", "bfloat16"),))


def test_worker_sends_events_in_order_from_opening_to_the_first_measurement(short: RecordedEngine) -> None:
    short.wait_for(events.Idle)
    kinds = [type(event) for event in short.events if not isinstance(event, events.Memory)]
    order = [
        events.LoadingProgress,
        events.ModelReady,
        events.CastDone,
        events.ModulesMeasured,
        events.Measured,
        events.Idle,
    ]
    indices = [kinds.index(kind) for kind in order]
    assert indices == sorted(indices)
    assert short.of(events.Memory)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no niceness for a thread")
def test_engine_thread_in_the_process_of_the_app_has_a_lower_priority() -> None:
    """An engine in a process of its own lowers the priority of that process."""
    with RecordedWorker() as recorded:
        recorded.wait_for(events.Idle)
        engine = next(thread.native_id for thread in threading.enumerate() if thread.name == "dtype-engine")
        assert engine is not None
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert os.getpriority(os.PRIO_PROCESS, engine) == max(NICENESS, own)


def test_no_events_of_a_recipe_arrive_after_a_newer_recipe_is_cast(demo: RecordedEngine) -> None:
    demo.wait_for(events.Idle)
    for _ in range(3):
        start = len(demo.events)
        demo.worker.request(SetRecipe(HALF))
        demo.worker.request(SetRecipe(BRAIN))
        demo.wait_for(events.Measured, since=start)
        after = demo.events[start:]
        done = next(
            index for index, event in enumerate(after) if isinstance(event, events.CastDone) and event.recipe == BRAIN
        )
        assert not any(getattr(event, "recipe", BRAIN) == HALF for event in after[done:])
        assert demo.of(events.Measured, start)[-1].report.rules == ("*=bfloat16",)


def test_event_of_a_measurement_has_the_recipe_that_was_measured(short: RecordedEngine) -> None:
    for recipe in (HALF, BRAIN, Recipe()):
        short.worker.request(SetRecipe(recipe))
        event = short.measured(recipe)
        assert event.report.rules == tuple(map(str, recipe.rules))
        assert event.report.memory.planned_bytes == event.report.memory.stored_bytes // (2 if recipe.rules else 1)


def test_generation_and_measurement_of_speed_use_the_current_recipe(short: RecordedEngine) -> None:
    short.worker.request(SetRecipe(HALF))
    short.worker.request(GENERATE.ask(GenerateText(3)))
    short.worker.request(SPEED.ask(None))
    short.worker.request(CHECK.ask(None))
    assert len(short.answer(GENERATE)[0].candidate.ids) == 3
    short.worker.request(TOKENS.ask(GenerateText(3)))
    assert (short.answer(TOKENS).tokens, short.answer(TOKENS).rules) == (3, ("*=float16",))
    assert short.wait_for(events.JobDone, lambda done: done.ask.job == "generate").recipe == HALF
    assert short.answer(SPEED).rules == ("*=float16",)
    check = short.answer(CHECK)
    assert (str(check.coverage), check.findings) == ("56 of 56 tensors found", ())
    assert any(event.what == "timing: reference" for event in short.of(events.WorkingProgress))
    short.worker.request(SetSettings(RunSettings(autocast="bfloat16")))
    short.wait_for(events.Measured, lambda event: event.report.settings == "autocast bfloat16")


def test_measurement_can_be_cancelled_and_the_session_continues(way: Way) -> None:
    with RecordedEngine(way, options=Options(prompts=("import os\n" * 1200,))) as recorded:
        recorded.wait_for(events.ModulesMeasured)
        recorded.worker.request(Cancel())
        assert recorded.wait_for(events.Stopped) == events.Stopped(Recipe(), "measure")
        recorded.wait_for(events.Idle)
        assert not recorded.of(events.Measured)
        recorded.worker.request(Measure(read_values=True))
        recorded.measured(Recipe())


def test_calibration_runs_of_a_cast_report_progress_and_can_be_cancelled(way: Way) -> None:
    rounded = Recipe((Rule("*.mlp", "int4@g32:gptq"),))
    with RecordedEngine(way, options=Options(prompts=("import os\n" * 400,) * 40)) as recorded:
        recorded.wait_for(events.ModelReady)
        recorded.worker.request(SetRecipe(rounded))
        first = recorded.wait_for(events.CastingProgress)
        assert first.recipe == rounded
        assert first.total >= 18 + 40, "18 weights, and at least a run over each input"
        recorded.wait_for(events.CastingProgress, lambda event: event.done > first.done)
        recorded.worker.request(Cancel())
        assert recorded.wait_for(events.Stopped) == events.Stopped(rounded, "measure")
        recorded.wait_for(events.Idle)
        assert rounded not in [event.recipe for event in recorded.of(events.CastDone)]
        start = len(recorded.events)
        recorded.worker.request(SetRecipe(HALF))
        assert recorded.wait_for(events.CastDone, since=start).recipe == HALF


def test_requests_cancelled_while_the_model_opens_are_reported(way: Way) -> None:
    recorded = RecordedEngine(way)
    recorded.worker.request(FLOW.ask(None))
    recorded.worker.request(Cancel())
    recorded.worker.start()
    try:
        recorded.wait_for(events.Idle)
        assert recorded.of(events.Stopped) == [events.Stopped(Recipe(), None, ("measure", "flow"))]
        assert not recorded.of(events.Measured)
    finally:
        recorded.worker.close()


def test_model_that_cannot_be_opened_is_reported(tmp_path: Path, way: Way) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise ValueError('no such luck')")
    recorded = RecordedEngine(way, f"{path}:Model")
    recorded.worker.request(SPEED.ask(None))
    recorded.worker.start()
    assert "no such luck" in recorded.wait_for(events.OpenFailed).message
    recorded.wait_for(events.Refused)
    recorded.wait_for(events.Idle)
    assert [event.job for event in recorded.of(events.Refused)] == ["speed"]
    recorded.worker.request(SetRecipe(HALF))
    recorded.worker.request(GENERATE.ask(GenerateText(3)))
    refused = recorded.wait_for(events.Refused, lambda event: event.job == "generate")
    assert "no such luck" in refused.message
    assert [event.job for event in recorded.of(events.Refused)] == ["speed", "generate"]
    recorded.wait_for(events.Idle, lambda _: len(recorded.of(events.Idle)) > 1)  # otherwise the app waits for ever
    recorded.worker.close()


def test_failing_forward_pass_does_not_end_the_session(tmp_path: Path, way: Way) -> None:
    path = tmp_path / "fails.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class Model(nn.Linear):\n"
        "    def __init__(self): super().__init__(2, 2)\n"
        "    def forward(self, x):\n"
        "        if self.weight.dtype == torch.float16: raise ValueError('not in half')\n"
        "        return super().forward(x)\n"
        "def example_inputs(): return (torch.ones(1, 2),)\n"
    )
    with RecordedEngine(way, f"{path}:Model") as recorded:
        recorded.worker.request(SetRecipe(HALF))
        assert "not in half" in recorded.wait_for(events.Failed).message
        recorded.worker.request(SetRecipe(BRAIN))
        recorded.measured(BRAIN)


def test_closing_a_busy_engine_ends_its_thread(way: Way) -> None:
    with RecordedEngine(way, options=Options(prompts=("import os\n" * 4000,))) as recorded:
        recorded.wait_for(events.ModulesMeasured)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dtype-engine")]


def test_scan_interrupted_by_a_newer_recipe_continues_afterwards(demo: RecordedEngine) -> None:
    demo.wait_for(events.Idle)
    start = len(demo.events)
    demo.worker.request(Scan(("int8",)))
    demo.wait_for(events.ScanUpdated, since=start)
    recipe = Recipe((Rule("*.mlp", "bfloat16"),))
    demo.worker.request(SetRecipe(recipe))
    measured = demo.events.index(demo.measured(recipe, start))
    demo.wait_for(events.ScanUpdated, lambda event: event.finished, measured)
    counts = [event.report.sequences for event in demo.of(events.ScanUpdated)]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_scan_after_a_cancelled_paused_scan_is_not_paused(short: RecordedEngine) -> None:
    short.wait_for(events.Idle)
    start = len(short.events)
    short.worker.request(Pause(True))
    short.worker.request(Scan(("int8",)))
    short.worker.request(Cancel())
    short.worker.request(Pause(True))
    short.worker.request(Scan(("int8",)))
    short.worker.request(Cancel())
    short.worker.request(Scan(("int8",)))
    short.wait_for(events.ScanUpdated, lambda event: event.finished, start)


def test_worker_reports_the_noise_floor_once_and_causes_on_request(short: RecordedEngine) -> None:
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
