"""Runs work for which the model is run many times independently: scans, searches for the causes of drift, and measurements of
several recipes. It uses worker processes if the user requested them, otherwise this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import CancelToken
from dtype_engine.core.errors import UserError
from dtype_engine.core.throttle import Throttle
from dtype_engine.core.units import plural
from dtype_engine.recipe import Recipe
from dtype_engine.worker import events
from dtype_engine.worker.commands import MeasureRecipes, Scan
from dtype_engine.worker.opening import OpenModel

if TYPE_CHECKING:
    from dtype_engine.evaluation.work import Over
    from dtype_engine.evaluation.workers import Workers
    from dtype_engine.results.attribution import AttributionReport, PartialAttribution
    from dtype_engine.results.scan import ScanReport
    from dtype_engine.runtime.session.session import Session


class ManyRuns:
    """Runs scans, the attribution of drift to modules, and measurements of several recipes: in this process or, if the user set
    `Options.workers`, in worker processes. Only `close` may be called from other threads than the worker's.
    """

    def __init__(self, model: OpenModel, emit: Callable[[events.Event], None]) -> None:
        self._model = model
        self._emit = emit
        self._workers: Workers | None = None
        self._measuring: MeasureRecipes | None = None
        """The `MeasureRecipes` command that ran last. If it was interrupted and runs again, the recipes whose indexes are in
        `_measured` are skipped.
        """
        self._measured: set[int] = set()

    def close(self) -> None:
        """End the worker processes, or disconnect from the cluster."""
        if self._workers is not None:
            self._workers.close()

    def scan(self, session: Session, recipe: Recipe, command: Scan, token: CancelToken) -> None:
        """Run the scan that `command` requests, or continue it if it was stopped before, and emit its results and progress. Raises
        the errors of `Session.scan`. recipe: the current recipe, which progress events name; the scan does not depend on it.
        """
        from dtype_engine.runtime.scan.scan import Scan as ScanInParts

        def on_estimate(report: ScanReport) -> None:
            self._emit(events.ScanUpdated(report, report.sequences == report.all_sequences))

        self._emit(events.WorkingProgress(recipe, "scan", 0, 1))  # the reference runs before the first part
        task = session.scan_task(command.dtypes, None, False, None)
        assert isinstance(task, ScanInParts)
        if command.keep and not self._model.options.read_only:
            from dtype_engine.worker.kept_scans import keep

            keep(task, lambda why: self._emit(events.Noticed(f"{why}; the scan goes on, but it is not saved")))
            if task.done and not task.finished:
                on_estimate(task.report())
        with self._over(session, task.private_bytes, bool(task.pending())) as over:
            if over is None:
                report = session.scan(
                    command.dtypes, on_progress=self._progress(recipe), on_estimate=on_estimate, cancelled=token
                )
            else:
                from dtype_engine.evaluation import work

                before, report_done = len(task.done), self._reporter(recipe, "scan", over)
                report_done(before, task.parts)
                report = work.scan(
                    session,
                    task,
                    over,
                    lambda what, done, total: report_done(before + done, task.parts),
                    on_estimate,
                    token,
                )
        self._emit(events.ScanUpdated(report, True))

    def causes(self, session: Session, recipe: Recipe, token: CancelToken) -> AttributionReport:
        """Return the modules that cause the drift of the session's recipe. recipe: this recipe, which progress events name. Raises
        the errors of `Session.causes`.
        """
        throttle = Throttle()

        def on_causes(found: PartialAttribution) -> None:
            if throttle.due():
                self._emit(events.AttributionGrown(recipe, found))

        with self._over(session, session.plan.planned_bytes) as over:
            if over is None:
                progress = partial(self._progress(recipe), "running each module as cast by itself")
                return session.causes(progress, token, on_causes)
            from dtype_engine.evaluation import work

            by = plural(over.pool.workers, "worker")
            self._emit(events.WorkingProgress(recipe, f"causes: {by} and the reference", 0, 1))
            return work.causes(session, over, self._reporter(recipe, "causes", over), token, on_causes)

    def recipes(self, session: Session, recipe: Recipe, command: MeasureRecipes, token: CancelToken) -> None:
        """Measure the recipes in `command` and emit each result. At the end, cast the session to `recipe`, the current one, again.
        Raises the errors of `Session.drift`.
        """
        from dtype_engine.evaluation import work

        if command is not self._measuring:
            self._measuring, self._measured = command, set()
        indexes = [index for index in range(len(command.recipes)) if index not in self._measured]
        wanted = [(command.recipes[index], session.settings) for index in indexes]
        count = len(command.recipes)
        with self._over(session, session.tree.stored_bytes) as over:
            report_done = self._reporter(recipe, "recipes", over)
            report_done(count - len(indexes), count)
            try:
                for at, report in work.drifts(session, wanted, over, token):
                    self._measured.add(indexes[at])
                    self._emit(events.RecipeMeasured(report, session.settings))
                    report_done(len(self._measured), count)
            finally:
                session.use_recipe(recipe)

    @contextmanager
    def _over(self, session: Session, private: int, needed: bool = True) -> Iterator[Over | None]:
        """A context manager that yields the worker processes, with the session's model open in them. It yields None if the work
        should run in this process. If the processes can't be started or fail, they are closed, and the next call starts new ones.

        private: how many bytes each process needs in addition to the mapped checkpoint. needed: whether there is any work; if
        False, None is yielded.
        """
        workers = self._model.options.workers
        if workers is None or not needed:
            yield None
            return
        from dtype_engine.evaluation.workers import Workers

        if self._workers is None:
            self._workers = Workers(workers, lambda sentence: self._emit(events.Noticed(sentence)))
        try:
            yield self._workers.over(session, self._model.source, private)
        except UserError:
            self._workers.close()
            raise

    def _progress(self, recipe: Recipe) -> Callable[[str, int, int | None], None]:
        throttle = Throttle()

        def on_progress(what: str, done: int, total: int | None) -> None:
            if throttle.due():
                self._emit(events.WorkingProgress(recipe, what, done, total or max(1, done)))

        return on_progress

    def _reporter(self, recipe: Recipe, what: str, over: Over | None) -> Callable[[int, int], None]:
        """Return a progress callback `(done, total)` that emits events such as `scan: 4 workers, 37 of 128`. what: the word before
        the colon. over: the workers, or None if the work runs in this process.
        """
        by = f"{plural(over.pool.workers, 'worker')}, " if over is not None else ""

        def report_done(done: int, total: int) -> None:
            self._emit(events.WorkingProgress(recipe, f"{what}: {by}{done} of {total}", done, total))

        return report_done
