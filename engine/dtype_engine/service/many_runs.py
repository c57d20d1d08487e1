"""Runs scans and measurements of several recipes: in worker processes if the user requested them, otherwise in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import CancelToken
from dtype_engine.recipe import Recipe
from dtype_engine.service import events
from dtype_engine.service.commands import MeasureRecipes, Scan
from dtype_engine.service.worker_processes import WorkerProcesses, shared_progress, throttled

if TYPE_CHECKING:
    from dtype_engine.results.scan import ScanReport
    from dtype_engine.runtime.session.session import Session


class ManyRuns:
    def __init__(self, processes: WorkerProcesses, emit: Callable[[events.Event], None]) -> None:
        self._processes = processes
        self._emit = emit
        self._measuring: MeasureRecipes | None = None
        """The command that ran last. If it runs again after an interruption, it skips the recipes `_measured`."""
        self._measured: set[int] = set()

    def scan(self, session: Session, recipe: Recipe, command: Scan, token: CancelToken) -> None:
        """Run a scan, or continue it if it was stopped before, and emit its results and progress. Raises the errors of
        `Session.scan`. recipe: the current recipe, which only progress events name.
        """
        from dtype_engine.runtime.scan.scan import Scan as ScanInParts

        def on_estimate(report: ScanReport) -> None:
            self._emit(events.ScanUpdated(report, report.sequences == report.all_sequences))

        self._emit(events.WorkingProgress(recipe, "scan", 0, 1))  # the reference runs before the first part
        task = session.scan_task(command.dtypes, None, False, None)
        assert isinstance(task, ScanInParts)
        if command.keep and not session.options.read_only:
            from dtype_engine.service.kept_scans import keep

            keep(task, lambda why: self._emit(events.Noticed(f"{why}; the scan goes on, but it is not saved")))
            if task.done and not task.finished:
                on_estimate(task.report())
        with self._processes.over(session, task.private_bytes, bool(task.pending())) as over:
            if over is None:
                report = session.scan(
                    command.dtypes,
                    on_progress=throttled(self._progress(recipe)),
                    on_estimate=on_estimate,
                    cancelled=token,
                )
            else:
                from dtype_engine.evaluation import work

                before, report_done = len(task.done), shared_progress(self._progress(recipe), "scan", over)
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

    def recipes(self, session: Session, recipe: Recipe, command: MeasureRecipes, token: CancelToken) -> None:
        """Measure several recipes and emit each result. At the end, cast the session to `recipe`, the current one, again.
        Raises the errors of `Session.drift`.
        """
        from dtype_engine.evaluation import work

        if command is not self._measuring:
            self._measuring, self._measured = command, set()
        indexes = [index for index in range(len(command.recipes)) if index not in self._measured]
        wanted = [(command.recipes[index], session.settings) for index in indexes]
        count = len(command.recipes)
        with self._processes.over(session, session.tree.stored_bytes) as over:
            report_done = shared_progress(self._progress(recipe), "recipes", over)
            report_done(count - len(indexes), count)
            try:
                for at, report in work.drifts(session, wanted, over, token):
                    self._measured.add(indexes[at])
                    self._emit(events.RecipeMeasured(report, session.settings))
                    report_done(len(self._measured), count)
            finally:
                session.use_recipe(recipe)

    def _progress(self, recipe: Recipe) -> Callable[[str, int, int], None]:
        return lambda what, done, total: self._emit(events.WorkingProgress(recipe, what, done, total))
