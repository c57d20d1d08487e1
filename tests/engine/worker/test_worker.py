from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtype_engine import Options, Recipe, Rule, RunSettings
from dtype_engine.checkpoint.source import Source, locate
from dtype_engine.worker import events
from dtype_engine.worker.worker import Worker

HALF = Recipe((Rule("*", "float16"),))
BRAIN = Recipe((Rule("*", "bfloat16"),))


class Heard:
    """A worker, and everything that it said."""

    def __init__(self, source: Source, options: Options | None = None) -> None:
        self.events: list[events.Event] = []
        self.worker = Worker(source, options or Options(), self.events.append)
        self.worker.start()

    def wait_for(self, condition: Callable[[events.Event], bool], seen: int = 0) -> events.Event:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            while seen < len(self.events):
                seen += 1
                if condition(self.events[seen - 1]):
                    return self.events[seen - 1]
            time.sleep(0.005)
        raise AssertionError(f"never heard it; heard {[type(event).__name__ for event in self.events]}")

    def wait_for_measured(self, recipe: Recipe) -> events.Event:
        return self.wait_for(lambda event: isinstance(event, events.Measured) and event.recipe == recipe)


@pytest.fixture
def demo() -> Iterator[Heard]:
    heard = Heard(locate(None))
    yield heard
    heard.worker.close()


def test_from_opening_to_the_first_measurement(demo: Heard) -> None:
    demo.wait_for(lambda event: isinstance(event, events.Idle))
    kinds = [type(event) for event in demo.events if not isinstance(event, events.Memory)]
    order = [
        events.LoadingProgress,
        events.ModelReady,
        events.CastDone,
        events.ModulesMeasured,
        events.Measured,
        events.Idle,
    ]
    places = [kinds.index(kind) for kind in order]
    assert places == sorted(places)
    assert any(isinstance(event, events.Memory) for event in demo.events)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no niceness for a thread")
def test_the_engine_gives_way_to_the_thread_that_answers_keys(demo: Heard) -> None:
    demo.wait_for(lambda event: isinstance(event, events.Idle))
    engine = next(thread.native_id for thread in threading.enumerate() if thread.name == "dtype-engine")
    assert engine is not None
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert os.getpriority(os.PRIO_PROCESS, engine) == min(19, own + 5)


def test_a_new_recipe_supersedes_the_one_under_way(demo: Heard) -> None:
    demo.wait_for(lambda event: isinstance(event, events.Idle))
    for _ in range(5):
        start = len(demo.events)
        demo.worker.set_recipe(HALF)
        demo.worker.set_recipe(BRAIN)
        demo.wait_for(lambda event: isinstance(event, events.Measured), seen=start)
        after = demo.events[start:]
        done = next(
            place for place, event in enumerate(after) if isinstance(event, events.CastDone) and event.recipe == BRAIN
        )
        assert not any(getattr(event, "recipe", BRAIN) == HALF for event in after[done:])
        measured = [event for event in after if isinstance(event, events.Measured)]
        assert measured[-1].report.rules == ("*=bfloat16",)


def test_measurements_belong_to_the_recipe_they_carry(demo: Heard) -> None:
    for recipe in (HALF, BRAIN, Recipe()):
        demo.worker.set_recipe(recipe)
        event = demo.wait_for_measured(recipe)
        assert isinstance(event, events.Measured)
        assert event.report.rules == tuple(map(str, recipe.rules))
        assert event.report.memory.planned_bytes == event.report.memory.stored_bytes // (2 if recipe.rules else 1)


def test_text_and_times_are_told_for_the_recipe_in_force(demo: Heard) -> None:
    demo.worker.set_recipe(HALF)
    demo.worker.generate(3)
    demo.worker.speed()
    text = demo.wait_for(lambda event: isinstance(event, events.Generated))
    assert text.recipe == HALF  # type: ignore[union-attr]
    assert len(text.texts[0].candidate.ids) == 3  # type: ignore[union-attr]
    times = demo.wait_for(lambda event: isinstance(event, events.SpeedMeasured))
    assert times.report.rules == ("*=float16",)  # type: ignore[union-attr]
    assert any(isinstance(event, events.WorkingProgress) and event.what == "timing: reference" for event in demo.events)
    demo.worker.set_settings(RunSettings(autocast="bfloat16"))
    demo.wait_for(lambda event: isinstance(event, events.Measured) and event.report.settings == "autocast bfloat16")


def test_esc_stops_a_measurement_and_the_session_goes_on() -> None:
    text = "import os\n" * 4000
    heard = Heard(locate(None), Options(prompts=(text,)))
    try:
        heard.wait_for(lambda event: isinstance(event, events.ModulesMeasured))
        heard.worker.cancel()
        heard.wait_for(lambda event: isinstance(event, events.Stopped))
        heard.wait_for(lambda event: isinstance(event, events.Idle))
        assert not any(isinstance(event, events.Measured) for event in heard.events)
        heard.worker.measure()
        heard.wait_for_measured(Recipe())
    finally:
        heard.worker.close()


def test_a_model_that_can_not_be_opened_is_told(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise ValueError('no such luck')")
    heard = Heard(locate(f"{path}:Model"))
    failed = heard.wait_for(lambda event: isinstance(event, events.OpenFailed))
    assert "no such luck" in failed.message  # type: ignore[union-attr]
    heard.wait_for(lambda event: isinstance(event, events.Idle))
    heard.worker.set_recipe(HALF)
    heard.worker.close()


def test_a_forward_pass_that_fails_leaves_the_session_alive(tmp_path: Path) -> None:
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
    heard = Heard(locate(f"{path}:Model"))
    try:
        heard.worker.set_recipe(HALF)
        failed = heard.wait_for(lambda event: isinstance(event, events.Failed))
        assert "not in half" in failed.message  # type: ignore[union-attr]
        heard.worker.set_recipe(BRAIN)
        heard.wait_for_measured(BRAIN)
    finally:
        heard.worker.close()


def test_closing_while_it_works_is_quick() -> None:
    heard = Heard(locate(None), Options(prompts=("import os\n" * 4000,)))
    heard.wait_for(lambda event: isinstance(event, events.ModulesMeasured))
    heard.worker.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dtype-engine")]
