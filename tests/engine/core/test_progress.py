"""The remaining time of a job, estimated from its pace, and the progress of imports while a model is opened."""

from __future__ import annotations

import itertools
import sys
import threading
import types

import pytest

from dtype_engine.core import opening_progress
from dtype_engine.core.job_pace import JobPace
from dtype_engine.core.opening_progress import READING_INPUTS, OpeningProgress


def test_remaining_time_is_unknown_at_the_start_of_every_job() -> None:
    seconds = [0.0]
    pace = JobPace(lambda: seconds[0])
    pace.follow("scan", 0.5)
    seconds[0] = 10.0
    pace.follow("scan", 0.75)
    assert pace.seconds_left == pytest.approx(10.0)
    pace.follow("export", 0.75)
    assert pace.seconds_left is None
    seconds[0] = 20.0
    pace.follow("export", 0.25)  # another export
    assert pace.seconds_left is None


def test_remaining_time_of_a_long_job_is_estimated_early() -> None:
    seconds = [0.0]
    pace = JobPace(lambda: seconds[0])
    pace.follow("drift", 0.0)
    seconds[0] = 5.0
    pace.follow("drift", 0.004)
    assert pace.seconds_left is None
    seconds[0] = 20.0
    assert pace.seconds_left is None
    pace.follow("drift", 0.01)
    assert pace.seconds_left == pytest.approx(20.0 * 99)


def test_opening_reports_modules_while_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    heard = threading.Event()

    def tell(step: str, done: int, total: int) -> None:
        told.append((step, done, total))
        if done > told[0][1]:
            heard.set()

    total = 2 * len(sys.modules)
    monkeypatch.setitem(opening_progress._MODULES, "checkpoint", total)
    with OpeningProgress(tell, "checkpoint") as on_step:
        on_step("importing")
        for number in range(5):
            monkeypatch.setitem(sys.modules, f"made_for_this_test_{number}", types.ModuleType("made_for_this_test"))
        assert heard.wait(30)
        for number in range(total):
            monkeypatch.setitem(sys.modules, f"made_for_this_test_{number}", types.ModuleType("made_for_this_test"))
        on_step("making the model")
        on_step(READING_INPUTS)
    assert told[-1][::2] == (READING_INPUTS, 0), "nothing says how far it is"
    told = [one for one in told if one[0] != READING_INPUTS]
    assert (told[0][0], told[-1][0]) == ("importing", "making the model")
    shares = [done / of for _, done, of in told]
    assert all(before <= after for before, after in itertools.pairwise(shares))
    assert 0.9 < shares[-1] < 1, "the model is yet to be made"
    assert not any(thread.name == "dtype-engine-opening" for thread in threading.enumerate())
