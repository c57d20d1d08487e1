"""How far a job is, and how long it will take."""

from __future__ import annotations

import pytest

from dtype_engine.core.units import time_left
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.service import events
from dtype_tui.state.activity import Activity


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def progress(done: int, run: str = "candidate") -> events.MeasuringProgress:
    return events.MeasuringProgress(Recipe(), run, done, 100)


def test_remaining_time_follows_the_pace_of_the_measurement() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.follow(progress(90))
    clock.now += 50
    activity.follow(progress(10, "reference"))
    assert activity.seconds_left is None, "another measurement began just now"
    clock.now += 5
    activity.follow(progress(20))
    assert activity.seconds_left == pytest.approx(40), "its passes take turns, and shares are of all of them"
    clock.now += 5
    activity.follow(progress(30, "reference"))
    activity.follow(progress(30))
    assert activity.seconds_left == pytest.approx(35)
    assert activity.progress_words(4) == " 30 % █▎   35 s left"
    activity.follow(events.Idle())
    assert activity.seconds_left is None


def test_remaining_time_is_unknown_in_the_first_second_and_without_a_total() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.follow(progress(0))
    clock.now += 1
    activity.follow(progress(90))
    assert activity.seconds_left is None
    activity.follow(events.MeasuringProgress(Recipe(), "candidate", 5, None))
    clock.now += 60
    assert activity.seconds_left is None
    assert activity.progress_words(4) == ""


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.2, "1 s"), (59.4, "59 s"), (60.0, "1 min"), (3500.0, "58 min"), (5400.0, "1.5 h")]
)
def test_remaining_times_are_formatted(seconds: float, shown: str) -> None:
    assert time_left(seconds) == shown


def test_words_of_a_job_end_when_the_next_job_begins() -> None:
    activity = Activity()
    activity.follow(events.Idle())
    activity.expect("write")
    activity.follow(events.Jobs("write", ("floor",)))
    activity.follow(events.SavingProgress(Recipe(), "exporting: 52.77 MiB/s", 5, 5))
    activity.follow(events.Jobs("floor", ()))
    assert activity.now() == ("measuring the noise floor", None)
    activity.follow(events.WorkingProgress(Recipe(), "measuring the noise floor", 1, 4))
    activity.follow(events.Jobs("floor", ("scan",)))
    assert activity.now() == ("measuring the noise floor", 0.25), "the same job goes on"


def test_job_that_waits_while_the_one_before_it_ends_can_be_stopped() -> None:
    activity = Activity()
    activity.expect("write")
    activity.follow(events.Idle())  # it was on its way before the engine knew of the job
    activity.follow(events.Jobs("", ("write",)))
    assert activity.now() == ("writing", None)
    activity.follow(events.Jobs("write", ()))
    activity.follow(events.Jobs("", ()))
    activity.follow(events.Idle())
    assert activity.now() == ("", None)


def test_progress_of_a_cast_says_whether_it_takes_calibration_runs() -> None:
    activity = Activity()
    for dtype, words in (("int4@g32", "casting 8 tensors"), ("int4@g32:gptq", "casting, with calibration runs")):
        activity.follow(events.CastingProgress(Recipe((Rule("*.mlp", dtype), Rule("*.bias", "bf16"))), 2, 8))
        assert activity.now() == (words, 0.25)
