"""Splits work into evaluations that a pool of workers runs. The work is a scan, the measurement of several recipes, a search for
the causes of drift, or the verification of an export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtype_engine.checkpoint import unchanged
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.evaluation.evaluate import describe, perform
from dtype_engine.evaluation.pool import Pool
from dtype_engine.evaluation.specs import (
    CompareTensors,
    Evaluated,
    Evaluation,
    ExactScore,
    Exported,
    Opened,
    PartAlone,
    RecipeDrift,
    ScanSequence,
    Task,
    model_text,
    other_versions,
    portable,
)
from dtype_engine.recipe import Recipe
from dtype_engine.results.drift import DriftReport

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.results.attribution import AttributionReport
    from dtype_engine.results.scan import ScanReport
    from dtype_engine.runtime.export.contents import Contents
    from dtype_engine.runtime.measure.attribution import OnCauses
    from dtype_engine.runtime.scan.last_scan import ScanTask
    from dtype_engine.runtime.scan.savable_scan import OnEstimate, OnStep
    from dtype_engine.runtime.session.session import Session
    from dtype_engine.runtime.verify.verify import CompareItems

_GROUP_BYTES, _GROUP_TENSORS = 64 << 20, 256
"""The maximum number of bytes, and of tensors, that one evaluation compares when workers verify an export."""


@dataclass(frozen=True, slots=True)
class Over:
    """A pool of workers, and what each worker opens to run tasks: the model and its inputs."""

    pool: Pool
    opened: Opened
    on_notice: Callable[[str], None] = lambda sentence: None
    """A function that is called with a sentence for the user if a worker process has other versions of this program, of torch or of
    the platform than this process. Each sentence is passed on only once.
    """

    def results(self, tasks: Sequence[Task], cancelled: IsCancelled) -> Iterator[tuple[int, Evaluated]]:
        """Run tasks on the workers of the pool, each of which opens the model once. Yields (index of the task, its result) as
        soon as a task is done. Raises Cancelled if `cancelled()` returns True.
        """
        noted: set[str] = set()
        for index, result in self.pool.results([Evaluation(self.opened, task) for task in tasks], cancelled):
            other = other_versions(result)
            if other and other not in noted:
                noted.add(other)
                self.on_notice(f"{other}: figures may differ from those of one process in their last digits")
            yield index, result


def opened_as(session: Session, source: Source, threads: int) -> Opened:
    """Return the model, inputs and options of a session as plain data, with which a worker in another process can open the same
    model.

    source: where the session's model comes from. threads: how many threads each worker should use. Raises UserError if the session
    has no inputs.
    """
    weights, inputs = describe(session)
    # The device's number is left out, because a worker sees only its own GPU, whose number there is 0.
    options = replace(session.options, settings=session.settings, device=session.model.device.type)
    return Opened(model_text(source), portable(options, threads), weights, inputs)


def scan(
    session: Session,
    task: ScanTask,
    over: Over,
    on_progress: OnStep = lambda step, done, total: None,
    on_estimate: OnEstimate = lambda report: None,
    cancelled: IsCancelled = never,
) -> ScanReport:
    """Run what is left of a session's scan on the workers of a pool, and return the report. Each task scans one sequence or, in an
    exact scan, one pair of a weight and a dtype. With the same number of threads, the result equals that of `task.run` to the last
    bit.

    `on_progress("scan", done, total)` is called after each task, and `on_estimate` with the report so far after each sequence.
    After an error, `task` keeps the results of the finished tasks. Raises the errors of `task.run`.
    """
    from dtype_engine.runtime.scan.exact import ExactScan, MeasuredWeight
    from dtype_engine.runtime.scan.sequence_scans import ScannedSequence

    tasks: list[Task]
    if isinstance(task, ExactScan):
        tasks = [ExactScore(task.dtypes, *key) for key in task.pending()]
    else:
        tasks = [ScanSequence(task.dtypes, task.backward_passes, index) for index in task.pending()]
    found = over.results(tasks, cancelled)
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
    recipes: Sequence[tuple[Recipe, RunSettings]],
    over: Over | None,
    cancelled: IsCancelled = never,
) -> Iterator[tuple[int, DriftReport]]:
    """Measure the drift of several recipes. Yields (index of the recipe, report) as soon as each recipe is measured.

    recipes: each recipe with the run settings for its measurement. over: the workers that measure. If None, this session measures
    all recipes, and its model stays cast by the last one. Raises the errors of `Session.drift`.
    """
    tasks = [RecipeDrift(*recipe) for recipe in recipes]
    if over is not None:
        for index, result in over.results(tasks, cancelled):
            assert isinstance(result.value, DriftReport)
            yield index, result.value
        return
    for index, task in enumerate(tasks):
        report = perform(session, task, cancelled)
        assert isinstance(report, DriftReport)
        yield index, report


def causes(
    session: Session,
    over: Over,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: IsCancelled = never,
    on_causes: OnCauses = ignore,
) -> AttributionReport:
    """Measure on the workers of a pool how much of the drift each module causes, and return the report. With the same number of
    threads, it equals the report of `Session.causes` to the last bit.

    `on_progress(done, total)` is called after each measured module or subtree with the number measured so far. `on_causes` is
    called with the contributions found so far.
    """
    from dtype_engine.runtime.measure.attribution import Part, PartDrift

    recipe, settings = session.recipe, session.settings

    def elsewhere(parts: Sequence[Part]) -> Iterator[tuple[int, PartDrift]]:
        tasks = [PartAlone(recipe, settings, part.name, part.modules) for part in parts]
        for index, result in over.results(tasks, cancelled):
            assert isinstance(result.value, PartDrift)
            yield index, result.value

    with unchanged(session.model.identities):
        return session.attribution().report(on_progress, cancelled, elsewhere, on_causes)


def comparing(pool: Pool, threads: int, folder: Path, source: Source, options: Options) -> CompareItems:
    """Return a function for `verify` to call, which compares the tensors of an export with their source on the workers of `pool`.
    The function takes the list of all exported tensors. It yields pairs: indexes of some tensors in this list, and for each of them
    None or a sentence that says what is wrong.

    threads: how many threads each worker uses. folder: the folder of the export. source: the checkpoint that was exported. options:
    how the workers open both.
    """
    from dtype_engine.runtime.verify.verify import fingerprint

    def compare(contents: Contents) -> Iterator[tuple[Sequence[int], Sequence[str | None]]]:
        worker_options = portable(options, threads)
        exported = Exported(model_text(source), worker_options, folder.absolute(), fingerprint(contents, folder))
        tasks = [CompareTensors(indexes) for indexes in _groups([item.nbytes for item in contents.items])]
        for index, result in pool.results([Evaluation(exported, task) for task in tasks]):
            if other := other_versions(result):
                raise UserError(f"{other}: a bitwise comparison needs equal versions")
            assert isinstance(result.value, tuple)
            yield tasks[index].indexes, result.value

    return compare


def _groups(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Divide the tensors of an export into groups, one for each evaluation: at most `_GROUP_BYTES` bytes (or a single larger
    tensor) and at most `_GROUP_TENSORS` tensors. Yields the indexes of each group's tensors. sizes: the bytes of each tensor.
    """
    group: list[int] = []
    nbytes = 0
    for index, size in enumerate(sizes):
        if group and (nbytes + size > _GROUP_BYTES or len(group) == _GROUP_TENSORS):
            yield tuple(group)
            group, nbytes = [], 0
        group.append(index)
        nbytes += size
    if group:
        yield tuple(group)
