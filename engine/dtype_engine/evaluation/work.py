"""Splits scans, measurements of recipes, searches for causes, and verifications into evaluations for a pool of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtype_engine.checkpoint import unchanged
from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.evaluation import specs
from dtype_engine.evaluation.evaluate import describe, perform
from dtype_engine.recipe import Recipe
from dtype_engine.results.drift import DriftReport

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.evaluation.cluster import DaskPool
    from dtype_engine.evaluation.pool import ProcessPool
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
    """A pool of workers, and the model and inputs that each worker opens to run tasks."""

    pool: ProcessPool | DaskPool
    opened: specs.Opened
    on_notice: Callable[[str], None] = lambda sentence: None
    """Called with a sentence if a worker has other versions of this program, of torch or of the platform, once per sentence."""

    def results(self, tasks: Sequence[specs.Task], cancelled: IsCancelled) -> Iterator[tuple[int, specs.Evaluated]]:
        """Run tasks on the workers. Yields (index of a task, its result) as soon as it is done. Raises UserError, Cancelled."""
        noted: set[str] = set()
        for index, result in self.pool.results([specs.Evaluation(self.opened, task) for task in tasks], cancelled):
            other = specs.other_versions(result)
            if other and other not in noted:
                noted.add(other)
                self.on_notice(f"{other}: figures may differ from those of one process in their last digits")
            yield index, result


def opened_as(session: Session, source: Source, threads: int) -> specs.Opened:
    """Return a session's model, inputs and options as plain data, with which a worker can open them with `threads` threads.
    Raises UserError if the session has no inputs.
    """
    weights, inputs = describe(session)
    # The device's number is left out, because a worker sees only its own GPU, whose number there is 0.
    options = replace(session.options, settings=session.settings, device=session.model.device.type)
    return specs.Opened(specs.model_text(source), specs.portable(options, threads), weights, inputs)


def scan(
    session: Session,
    task: ScanTask,
    over: Over,
    on_progress: OnStep = lambda step, done, total: None,
    on_estimate: OnEstimate = lambda report: None,
    cancelled: IsCancelled = never,
) -> ScanReport:
    """Run the rest of a session's scan on the workers, and return the report. With the same number of threads, the report equals
    that of `task.run` to the last bit.

    Each task scans one sequence or, in an exact scan, one weight in one dtype. `on_progress("scan", done, total)` is called
    after each task, and `on_estimate` with the report so far after each sequence. For dtypes with a rounding, this process rounds
    the weights before, and the workers of this machine read them. After an error, `task` keeps the results of the finished tasks.
    Raises the errors of `task.run`.
    """
    from dtype_engine.evaluation.pool import ProcessPool
    from dtype_engine.runtime.scan.exact import ExactScan, MeasuredWeight
    from dtype_engine.runtime.scan.sequence_scans import ScannedSequence

    tasks: list[specs.Task]
    if isinstance(task, ExactScan):
        _refuse_other_fit(session, task.dtypes)
        tasks = [specs.ExactScore(task.dtypes, *key) for key in task.pending()]
    else:
        pending, local = task.pending(), isinstance(over.pool, ProcessPool)
        if not local:
            _refuse_other_fit(session, task.dtypes)
        rounded = task.share_rounded(on_progress, cancelled) if pending and local else None
        tasks = [specs.ScanSequence(task.dtypes, task.backward_passes, index, rounded) for index in pending]
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


def _refuse_other_fit(session: Session, names: Iterable[str]) -> None:
    """Raise UserError if a dtype has a rounding that workers would fit to other inputs than this session, which has fitted it to
    inputs that it no longer measures on.
    """
    rounded = next((name for name in names if name in dtypes.BY_NAME and dtypes.BY_NAME[name].rounding), None)
    fitted = session.calibration
    if rounded is None or fitted is None or session.options.calibration or fitted.on_measured_inputs:
        return
    raise UserError(
        f"{rounded} was fitted to {fitted.inputs.description}, which workers do not have: name the inputs with --calibration "
        "FILE, or leave out --workers"
    )


def drifts(
    session: Session,
    recipes: Sequence[tuple[Recipe, RunSettings]],
    over: Over | None,
    cancelled: IsCancelled = never,
) -> Iterator[tuple[int, DriftReport]]:
    """Measure several recipes, each with its settings. Yields (index of the recipe, report) as soon as one is measured.

    over: the workers that measure. If None, `session` measures, and its model stays cast by the last recipe. Raises the errors of
    `Session.drift`.
    """
    tasks = [specs.RecipeDrift(*recipe) for recipe in recipes]
    if over is not None:
        _refuse_other_fit(session, (rule.dtype for recipe, _ in recipes for rule in recipe.rules))
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
    """Measure on the workers how much of the drift each module causes. With the same number of threads, the report equals that
    of `Session.causes` to the last bit.

    `on_progress(done, total)` is called after each measured module or subtree, and `on_causes` with the contributions so far.
    """
    from dtype_engine.runtime.measure.attribution import Part, PartDrift

    recipe, settings = session.recipe, session.settings
    _refuse_other_fit(session, (rule.dtype for rule in recipe.rules))

    def elsewhere(parts: Sequence[Part]) -> Iterator[tuple[int, PartDrift]]:
        tasks = [specs.PartAlone(recipe, settings, part.name, part.modules) for part in parts]
        for index, result in over.results(tasks, cancelled):
            assert isinstance(result.value, PartDrift)
            yield index, result.value

    with unchanged(session.model.identities):
        return session.attribution().report(on_progress, cancelled, elsewhere, on_causes)


def comparing(
    pool: ProcessPool | DaskPool, threads: int, folder: Path, source: Source, options: Options
) -> CompareItems:
    """Return a function for `verify` to call, which compares the tensors of an export with their source on the workers of
    `pool`.

    The function takes the list of all exported tensors, and yields pairs: indexes in this list, and for each index None or a
    sentence that says what is wrong. It raises UserError if a worker has other versions of libraries. threads: the number of
    threads of each worker. options: for opening the export and its source.
    """
    from dtype_engine.runtime.verify.verify import fingerprint

    def compare(contents: Contents) -> Iterator[tuple[Sequence[int], Sequence[str | None]]]:
        worker_options = specs.portable(options, threads)
        exported = specs.Exported(
            specs.model_text(source), worker_options, folder.absolute(), fingerprint(contents, folder)
        )
        tasks = [specs.CompareTensors(indexes) for indexes in _groups([item.nbytes for item in contents.items])]
        for index, result in pool.results([specs.Evaluation(exported, task) for task in tasks]):
            if other := specs.other_versions(result):
                raise UserError(f"{other}: a bitwise comparison needs equal versions")
            assert isinstance(result.value, tuple)
            yield tasks[index].indexes, result.value

    return compare


def _groups(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the indexes of tensors in groups of at most `_GROUP_BYTES` and `_GROUP_TENSORS`. A group of one may be larger."""
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
