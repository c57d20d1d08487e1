"""The controller without a screen: what it makes of events, asks of the engine and says."""

from __future__ import annotations

import dataclasses
import re

import msgspec
import pytest
from tests.helpers.recording_engine import RecordingEngine, demo_tree, report

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.results.memory import MemoryStats
from dtype_engine.service import events
from dtype_engine.service.jobs import GENERATE
from dtype_tui.state import experiment as experiment_module
from dtype_tui.state.controller import Controller
from dtype_tui.state.experiment import Experiment, ModelFacts
from dtype_tui.state.launch import Launch
from dtype_tui.state.preview import cache_change, preview
from dtype_tui.state.rule_list import RuleList
from dtype_tui.state.session_store import SavedSession
from dtype_tui.widgets.header import header_line
from dtype_tui.widgets.prompts import preview_words

BF16 = Recipe((Rule("*", "bfloat16"),))
OTHER = Recipe((Rule("*", "float16"),))


class Alone:
    """A controller on the demo's headers, with all that it says and how often it has something drawn."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.drawn = 0
        self.engine = RecordingEngine(lambda event: None)
        self.experiment = Experiment(ModelFacts("demo"), demo_tree())
        self.controller = Controller(self.experiment, self.engine, lambda *said: self.said.append(said), self._draw)

    def _draw(self) -> None:
        self.drawn += 1

    def opened(self) -> None:
        ready = events.ModelReady(self.experiment.tree, "LlamaForCausalLM", "cpu", 1.0, "prompts", ())
        assert self.controller.handle(ready)
        assert self.controller.handle(events.Idle())


@pytest.fixture
def alone() -> Alone:
    return Alone()


@pytest.mark.parametrize(
    "event",
    [
        events.Memory(OTHER, MemoryStats()),
        events.CastingProgress(OTHER, 1, 2),
        events.MeasuringProgress(OTHER, "candidate", 1, 2),
        events.WorkingProgress(OTHER, "timing", 1, 2),
        events.ModulesMeasured(OTHER, (ModuleDrift("model.norm", 1.0, 1.0, 0),)),
        events.Measured(OTHER, report(OTHER)),
        events.CastDone(OTHER, ()),
        events.Failed(OTHER, "no kernel"),
        events.JobDone(OTHER, GENERATE.ask(None), ()),
    ],
    ids=lambda event: type(event).__name__,
)
def test_results_of_another_recipe_are_ignored(alone: Alone, event: events.Event) -> None:
    alone.opened()
    alone.controller.apply_recipe(BF16)
    before = dataclasses.replace(alone.experiment)
    activity = dict(vars(alone.controller.activity))
    said = list(alone.said)
    assert not alone.controller.handle(event)
    assert alone.experiment == before
    assert vars(alone.controller.activity) == activity
    assert alone.said == said
    assert alone.controller.handle(msgspec.structs.replace(event, recipe=BF16)), "but for the recipe in force it counts"  # type: ignore[union-attr]


def test_events_on_saves_and_cancelled_jobs_are_shown_for_any_recipe(alone: Alone) -> None:
    alone.controller.apply_recipe(BF16)
    assert alone.controller.handle(events.SavingProgress(OTHER, "exporting", 1, 4))
    assert alone.controller.activity.now() == ("exporting", 0.25)
    assert alone.controller.handle(events.Saved(OTHER, True, "wrote it"))
    assert alone.controller.handle(events.Stopped(OTHER, "speed"))
    assert [sentence for sentence, _ in alone.said] == ["wrote it", "stopped: timing; t times again"]


def test_measurement_that_ran_under_other_settings_is_ignored(alone: Alone) -> None:
    alone.opened()
    late = events.Measured(Recipe(), report(Recipe()))
    alone.controller.set_settings(RunSettings(autocast="bfloat16"))
    assert not alone.controller.handle(late)
    assert alone.experiment.results.report is None


def test_memory_for_module_results_is_limited(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_module, "_MOST_MODULES_SIZE", 5_000)
    for number in range(300):
        name = f"m{number}" * (1 + number % 7)
        alone.controller.handle(events.ModulesMeasured(Recipe(), (ModuleDrift(name, 0.1, 0.2, 0),)))
        modules = alone.experiment.results.modules
        assert name in modules
        assert sum(100 + len(known) for known in modules) <= 5_000


def test_notices_of_a_measurement_are_shown_only_once(alone: Alone) -> None:
    ready = events.ModelReady(alone.experiment.tree, "LlamaForCausalLM", "cpu", 1.0, "prompts", ("made at random",))
    assert alone.controller.handle(ready)
    assert [sentence for sentence, _ in alone.said] == ["made at random"]
    for notices in (("made at random", "the model writes to steps"), ("the model writes to steps",)):
        told = dataclasses.replace(report(Recipe()), notices=notices)
        assert alone.controller.handle(events.Measured(Recipe(), told))
    assert alone.said[1:] == [("the model writes to steps", "warning")]


def test_rule_is_sent_to_the_engine_unless_it_matches_nothing(alone: Alone) -> None:
    alone.opened()
    alone.controller.add_rule(Rule("*", "bfloat16"))
    assert alone.engine.recipes == [BF16]
    assert (alone.drawn, alone.said, alone.controller.activity.now()) == (1, [], ("casting", None))
    alone.controller.add_rule(Rule("*.nowhere", "bfloat16"))
    assert alone.engine.recipes == [BF16]
    assert (alone.drawn, alone.said[0][1]) == (1, "warning")


def test_quitting_while_saving_must_be_confirmed(alone: Alone) -> None:
    assert alone.controller.life.may_quit()
    alone.controller.handle(events.SavingProgress(Recipe(), "exporting", 1, 4))
    assert not alone.controller.life.may_quit()
    assert alone.controller.life.may_quit()
    alone.controller.handle(events.Saved(Recipe(), True, "wrote it"))
    alone.controller.handle(events.SavingProgress(Recipe(), "exporting", 1, 4))
    assert not alone.controller.life.may_quit(), "asked anew for what is written anew"


def test_rules_of_a_resumed_session_precede_those_of_the_command_line(alone: Alone) -> None:
    saved = SavedSession(
        None, "demo", rule_lists=(RuleList(), RuleList.of(BF16.rules)), at=1, context=512, batch=3, budget=1 << 30
    )
    alone.controller.begin(Launch("demo", recipe=OTHER, saved=saved, context=64))
    found = alone.experiment
    assert (found.served.context, found.served.batch, found.served.budget) == (64, 3, 1 << 30), (
        "the command line comes first"
    )
    assert alone.experiment.recipe == Recipe((*BF16.rules, *OTHER.rules))
    assert alone.engine.recipes[-1] == alone.experiment.recipe
    alone.controller.undo()
    assert alone.experiment.recipe == BF16


def test_scan_key_asks_for_dtypes_then_waits_and_resumes_an_interrupted_scan(alone: Alone) -> None:
    alone.opened()
    controller = alone.controller
    assert controller.next_of_scan() == "choose"
    controller.start_scan(("bfloat16",))
    assert controller.next_of_scan() == "wait"
    assert "first estimates" in alone.said[-1][0]
    controller.handle(events.Idle())
    assert controller.next_of_scan() == "wait"
    assert alone.engine.commands == ["scan bfloat16", "scan bfloat16"], "one that was stopped goes on"


def test_cancelling_a_waiting_scan_keeps_the_running_measurement(alone: Alone) -> None:
    alone.opened()
    alone.controller.handle(events.Jobs("measure", ()))
    alone.controller.handle(events.MeasuringProgress(Recipe(), "candidate", 1, 4))
    alone.controller.start_scan(("bfloat16",))
    alone.controller.stop_job("scan")
    assert alone.engine.commands == ["scan bfloat16", "cancel scan"]
    assert not alone.experiment.scan.running
    assert alone.controller.life.current_activity()[0] == "measuring: candidate"
    alone.controller.stop_job("measure")
    assert alone.engine.commands[-1] == "cancel measure"
    assert alone.controller.life.current_activity()[0] == "stopping: measuring: candidate"


def test_header_names_the_remote_host_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingEngine, "host", "gpu")
    alone = Alone()
    assert re.search(r"^ demo  .*  gpu  ", header_line(alone.experiment, 80).plain)
    alone.opened()
    assert header_line(alone.experiment, 120).plain.startswith(" demo  LlamaForCausalLM  707.8 k params  cpu on gpu  ")
    assert "Llama" not in header_line(alone.experiment, 60).plain, "the class is left out before the device"


def test_new_kv_cache_rule_clears_the_drift_of_the_previous_recipe(alone: Alone) -> None:
    """A rule for KV caches changes no weight, but the results of the previous recipe no longer hold."""
    alone.opened()
    alone.controller.apply_recipe(BF16)
    alone.controller.handle(events.Measured(BF16, report(BF16)))
    assert alone.experiment.results.report is not None
    alone.controller.add_rule(Rule.parse("*.0.*.kv_cache=fp8"))
    assert alone.experiment.results.report is None
    assert len(alone.experiment.plan.caches) == 2
    shown = preview(alone.experiment.tree, alone.experiment.plan, Rule.parse("*.kv_cache=int4@kivi"))
    assert len(shown.caches) == 12
    change = cache_change(alone.experiment, shown, "int4@kivi")
    assert change == "1.03 MiB → 420.00 KiB at 1,024 tokens", "of 6 layers, one has fp8 already"
    assert preview_words(shown, change) == f"matches 12 tensors of KV caches · {change}"
    assert cache_change(alone.experiment, shown, "stored").startswith("1.03 MiB → 1.12 MiB at ")
    alone.controller.undo()
    assert not alone.experiment.plan.caches
