"""Scans and recipes in the parts that a pool evaluates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.options import RunSettings
from dtype_engine.core.units import plural
from dtype_engine.evaluation.evaluate import describe, perform
from dtype_engine.evaluation.pool import Pool
from dtype_engine.evaluation.specs import (
    Evaluation,
    ExactScore,
    Opened,
    RecipeDrift,
    ScanSequence,
    Task,
    model_text,
    portable,
)
from dtype_engine.results.drift import DriftReport

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.results.scan import ScanReport
    from dtype_engine.runtime.scan.scan import OnEstimate, OnStep
    from dtype_engine.runtime.scan.tasks import ScanTask
    from dtype_engine.runtime.session import Session


@dataclass(frozen=True, slots=True)
class Over:
    """Who evaluates, and what they have to open."""

    pool: Pool
    opened: Opened


def opened_as(session: Session, source: Source, typed: str | None, threads: int) -> Opened:
    """What others have to open to have what this session has, each with so many threads. Raises UserError."""
    weights, inputs = describe(session)
    return Opened(model_text(source, typed), portable(session.options, threads), weights, inputs)


def scan(
    session: Session,
    task: ScanTask,
    over: Over,
    on_progress: OnStep = lambda step, done, total: None,
    on_estimate: OnEstimate = lambda report: None,
    cancelled: IsCancelled = never,
) -> ScanReport:
    """Run what is pending of a session's scan over a pool: the result is that of `task.run`, to the last bit, for the same number
    of threads. `on_progress("scan", done, total)` counts its parts. Raises as `task.run`; what is done is kept in it.
    """
    from dtype_engine.runtime.scan.exact import ExactScan, MeasuredWeight
    from dtype_engine.runtime.scan.scan import ScannedSequence

    tasks: list[Task]
    if isinstance(task, ExactScan):
        tasks = [ExactScore(task.dtypes, *key) for key in task.pending()]
    else:
        tasks = [ScanSequence(task.dtypes, task.backward_passes, index) for index in task.pending()]
    found = over.pool.results([Evaluation(over.opened, part) for part in tasks], cancelled)
    for done, (_, result) in enumerate(found, 1):
        if isinstance(task, ExactScan):
            assert isinstance(result.value, MeasuredWeight)
            task.add(result.value)
        else:
            assert isinstance(result.value, ScannedSequence)
            task.add(result.value)
            on_estimate(task.report())
        on_progress("scan", done, len(tasks))
    session.scanned = task.run(cancelled=cancelled)  # nothing is left to run
    return session.scanned


def drifts(
    session: Session,
    recipes: Sequence[tuple[tuple[str, ...], RunSettings]],
    over: Over | None,
    cancelled: IsCancelled = never,
) -> Iterator[tuple[int, DriftReport]]:
    """The drift of every recipe (its rules and settings), with its index, as they come: over a pool, or one after the other in this
    session, whose recipe in force is another afterwards. Raises as `Session.drift`.
    """
    tasks = [RecipeDrift(*recipe) for recipe in recipes]
    if over is not None:
        for index, result in over.pool.results([Evaluation(over.opened, task) for task in tasks], cancelled):
            assert isinstance(result.value, DriftReport)
            yield index, result.value
        return
    for index, task in enumerate(tasks):
        report = perform(session, task, cancelled)
        assert isinstance(report, DriftReport)
        yield index, report


class Pace:
    """How far parallel work is, in words."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._first: tuple[int, float] | None = None

    def line(self, done: int, total: int) -> str:
        """`4 workers, 37 of 128, 2 min left`; the time from the second result on, since the first waits for the model."""
        now = time.perf_counter()
        said = f"{plural(self._workers, 'worker')}, {done} of {total}"
        if self._first is None:
            self._first = done, now
            return said
        seconds = (now - self._first[1]) / max(1, done - self._first[0]) * (total - done)
        left = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        return f"{said}, {left} left"
