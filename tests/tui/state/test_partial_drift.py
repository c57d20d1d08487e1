"""Figures of a measurement that is under way, or was stopped: where they are kept, and what takes their place."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from tests.helpers.recording_engine import demo_tree, report

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.drift import Extent, PartialDrift
from dtype_engine.results.figures import kl_error
from dtype_engine.results.inputs import InputsSummary
from dtype_engine.service import events
from dtype_tui.state.activity import Activity
from dtype_tui.state.experiment import Experiment, ModelFacts
from dtype_tui.widgets.status import status_line

DEFAULTS = RunSettings()
BF16 = Recipe((Rule("*", "bfloat16"),))


def so_far(done: int, settings: RunSettings = DEFAULTS) -> events.OutputMeasured:
    extent = Extent(done=done, total=6, positions=100 * done, of_tokens=True, rel_l2_error=0.1, kl_error=0.2)
    return events.OutputMeasured(BF16, settings, PartialDrift(report(BF16).output, extent))


@pytest.fixture
def experiment() -> Experiment:
    made = Experiment(ModelFacts("demo", inputs="prompts"), demo_tree())
    made.push(BF16)
    return made


def test_history_has_partial_drift_until_the_measurement_is_complete(experiment: Experiment) -> None:
    for done in (1, 2):
        experiment.take(so_far(done))
    assert experiment.results.partial_drift == so_far(2).drift
    (entry,) = experiment.measured
    assert entry.in_part
    assert (entry.extent.done, entry.extent.total, entry.recipe) == (2, 6, BF16)
    # 20 % of a mean KL of 2.5e-4, and not the error of a mean over these positions
    assert kl_error(entry.output, entry.extent) == pytest.approx(0.2 * 2.5e-4)
    experiment.take(events.Measured(BF16, report(BF16)))
    assert experiment.results.partial_drift is None
    (entry,) = experiment.measured
    assert not entry.in_part
    assert kl_error(entry.output, entry.extent) == 1e-5


def test_partial_drift_does_not_replace_a_complete_one_in_the_history(experiment: Experiment) -> None:
    experiment.take(events.Measured(BF16, report(BF16)))
    whole = experiment.measured
    experiment.forget_figures()
    experiment.take(so_far(3))
    assert experiment.measured == whole
    assert experiment.results.partial_drift is not None


def test_partial_drift_stays_after_a_cancel_and_is_cleared_with_the_recipe(experiment: Experiment) -> None:
    experiment.take(so_far(2))
    experiment.take(events.Idle())
    assert experiment.results.partial_drift is not None
    experiment.undo()
    assert experiment.results.partial_drift is None
    assert experiment.is_stale(so_far(3))


def test_partial_drift_under_other_settings_is_ignored(experiment: Experiment) -> None:
    autocast = RunSettings(autocast="bfloat16")
    experiment.set_settings(autocast)
    assert experiment.is_stale(so_far(2))
    assert not experiment.is_stale(so_far(2, autocast))


def test_drift_report_over_some_sequences_is_marked_as_partial(experiment: Experiment) -> None:
    some = dataclasses.replace(report(BF16), sequences=so_far(4).drift.extent)
    experiment.take(events.Measured(BF16, some))
    (entry,) = experiment.measured
    assert entry.in_part
    assert entry.seconds is None


def test_status_line_shows_the_partial_drift_if_it_is_wide(experiment: Experiment) -> None:
    experiment.take(so_far(2))
    activity = Activity()
    activity.begin("measuring: candidate", 0.4)
    wide = status_line(experiment, ("measuring: candidate", 0.4, "Esc stops"), activity, "", 120, {})
    assert "KL 2.500e-04 ± 5e-05 nats, 2 of 6 sequences" in wide.plain
    narrow = status_line(experiment, ("measuring: candidate", 0.4, "Esc stops"), activity, "", 80, {}).plain
    assert "2 of 6 sequences  Esc stops" in narrow
    assert "KL" not in narrow, "the Drift pane has it"
    assert len(narrow) <= 80


def test_status_line_shows_bytes_read_from_disk(experiment: Experiment) -> None:
    memory = dataclasses.replace(report(BF16).memory, read_bytes=3 << 29)
    experiment.take(events.Memory(BF16, memory))
    activity = Activity()
    activity.begin("measuring: reference", 0.4)
    doing = "measuring: reference", 0.4, "Esc stops"
    assert " 40 % ██▍     1.5 GiB read  Esc stops" in status_line(experiment, doing, activity, "", 80, {}).plain
    assert "GiB" not in status_line(experiment, ("", None, ""), activity, "ready", 80, {}).plain
    experiment.take(events.Memory(BF16, dataclasses.replace(memory, read_bytes=None)))
    assert "GiB" not in status_line(experiment, doing, activity, "", 80, {}).plain


def test_drift_of_a_recipe_measured_before_is_shown_at_once(experiment: Experiment) -> None:
    found = report(BF16)
    experiment.take(events.Measured(BF16, found))
    experiment.push(Recipe((*BF16.rules, Rule("*.mlp", "int8"))))
    assert experiment.results.report is None
    experiment.undo()
    assert experiment.results.report is found
    assert set(experiment.results.modules) == {reading.name for reading in found.modules}
    experiment.take(so_far(1))
    assert experiment.results.report is found  # until it is measured anew
    experiment.set_settings(RunSettings(autocast="bfloat16"))
    assert experiment.results.report is None
    experiment.set_settings(RunSettings())
    assert experiment.results.report is found
    experiment.set_inputs(InputsSummary("other prompts", (), None, ()))
    assert experiment.results.report is None


def test_partial_drift_and_that_of_another_model_are_not_shown_again(experiment: Experiment) -> None:
    whole = report(BF16)
    extent = Extent(done=2, total=6, positions=200)
    experiment.take(events.Measured(BF16, dataclasses.replace(whole, sequences=extent)))
    experiment.undo()
    experiment.redo()
    assert experiment.results.report is None
    experiment.take(events.Measured(BF16, whole))
    ready = events.ModelReady(experiment.tree, "Net", "cpu", 1.0, "prompts", (), "")
    experiment.set_model(ready)
    assert experiment.results.report is None


@pytest.mark.parametrize("title", ["demo", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_narrow_status_line_shows_time_left_and_number_of_sequences(experiment: Experiment, title: str) -> None:
    now = [0.0]
    activity = Activity(lambda: now[0])
    for share in (0.0, 0.4):
        activity.begin("measuring: candidate", share)
        now[0] += 60.0
    experiment.take(so_far(2))
    experiment.model = msgspec.structs.replace(experiment.model, title=title)
    line = status_line(experiment, ("measuring: candidate", 0.4, "Esc stops"), activity, "", 80, {}).plain
    assert " min left  2 of 6 sequences  Esc stops" in line
    assert len(line) <= 80
