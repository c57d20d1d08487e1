"""The seam for many evaluations, and pausing."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from tests.helpers import architectures

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.core.cancellation import CancelToken
from dtype_engine.runtime.scan.evaluation import InLine


def session() -> Any:
    module, inputs = architectures.make("llama")
    return de.open(module, inputs=inputs)


class Counting(Executor):
    """Evaluates in line, and counts: what a cluster's would see."""

    def __init__(self) -> None:
        self.submitted = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted += 1
        return InLine().submit(fn, *args, **kwargs)


def test_every_exact_score_goes_through_the_executor() -> None:
    one, other = session(), session()
    other.executor = Counting()
    expected, found = one.scan(["int8"], exact=True), other.scan(["int8"], exact=True)
    assert found.scores() == expected.scores()
    assert other.executor.submitted == sum(score.dtype == "int8" for score in found.weights)


def test_verifying_measures_each_recipe_and_leaves_the_one_in_force() -> None:
    one = session()
    one.cast("*", "bfloat16")
    recipes = [Recipe((Rule("*.mlp", dtype),)) for dtype in ("int8", "float8_e5m2")]
    found = one.verify(recipes)
    assert {weight.dtype for weight in one.model.weights.values() if weight.info.persistent} == {"bfloat16"}
    for recipe, value in zip(recipes, found, strict=True):
        one.apply(recipe)
        assert one.drift().output.kl_mean == pytest.approx(value, rel=1e-6)


def test_in_line_runs_nothing_ahead_and_keeps_errors_for_the_result() -> None:
    ran: list[int] = []
    results = InLine().map(ran.append, [1, 2, 3])
    assert ran == []
    next(results)
    assert ran == [1]
    failed = InLine().submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()


def test_a_paused_scan_waits_and_loses_nothing() -> None:
    whole = session().scan(["int8"], draws=4).scores()
    gate, one, found = CancelToken(), session(), []
    seen = threading.Event()

    def progress(what: str, done: int, total: int | None) -> None:
        if done == 3:
            gate.pause()
            seen.set()

    thread = threading.Thread(
        target=lambda: found.append(one.scan(["int8"], draws=4, on_progress=progress, cancelled=gate))
    )
    thread.start()
    assert seen.wait(60)
    assert gate.paused
    assert not found
    gate.resume()
    thread.join(60)
    assert found[0].scores() == whole


def test_a_paused_scan_can_be_cancelled() -> None:
    gate, one = CancelToken(), session()
    gate.pause()
    threading.Timer(0.05, gate.cancel).start()
    with pytest.raises(de.Cancelled):
        one.scan(["int8"], draws=4, cancelled=gate)
