"""Runs scans and measurements of several recipes: in worker processes if the user requested them, otherwise in this process."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import CancelToken
from dtype_engine.core.errors import UserError
from dtype_engine.core.user_folders import state_folder
from dtype_engine.recipe import Recipe
from dtype_engine.reports.versions import versions
from dtype_engine.service import events
from dtype_engine.service.commands import MeasureRecipes, Scan
from dtype_engine.service.worker_processes import WorkerProcesses, shared_progress, throttled

if TYPE_CHECKING:
    from dtype_engine.results.scan import ScanReport
    from dtype_engine.runtime.scan.scan import Scan as ScanInParts
    from dtype_engine.runtime.session.session import Session

_MOST_KEPT = 20
"""The maximum number of earlier saved scans that are kept when a scan begins."""


class ManyRuns:
    def __init__(self, processes: WorkerProcesses, emit: Callable[[events.Event], None]) -> None:
        self._processes = processes
        self._emit = emit
        self._measuring: MeasureRecipes | None = None
        """The command that ran last. If it runs again after an interruption, it skips the recipes with the indexes `_measured`."""
        self._measured: set[int] = set()

    def scan(self, session: Session, recipe: Recipe, command: Scan, token: CancelToken) -> None:
        """Run a scan, or continue a stopped one, and emit its results and progress. Raises the errors of `Session.scan`."""
        from dtype_engine.runtime.scan.scan import Scan as ScanInParts

        def on_estimate(report: ScanReport) -> None:
            self._emit(events.ScanUpdated(report, report.sequences == report.all_sequences))

        self._emit(events.WorkingProgress(recipe, "scan", 0, 1))  # the reference runs before the first part
        task = session.scan_task(command.dtypes, None, False, None)
        assert isinstance(task, ScanInParts)
        if command.keep and not session.options.read_only:
            _keep(task, lambda why: self._emit(events.Noticed(f"{why}; the scan goes on, but it is not saved")))
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
        """Measure the recipes of `command`, then cast to `recipe`, the current one, again. Raises the errors of `Session.drift`."""
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


def _keep(scan: ScanInParts, on_unsaved: Callable[[str], None]) -> None:
    """Save a scan's results after every sequence, and continue the scan from results that an earlier engine saved for the same
    weights, inputs, dtypes and library versions.

    If the file can't be written, `on_unsaved` is called once with the reason, and the scan continues unsaved.
    """
    if scan.save is not None:
        return
    folder = state_folder() / "scans"
    about = f"{scan.fingerprint} {scan.backward_passes} {versions()}"
    path = folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        newest_first = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
        for file in newest_first[_MOST_KEPT:]:
            file.unlink(missing_ok=True)
    except OSError as error:
        on_unsaved(f"can't write to {folder}: {error.strerror}")
        return
    try:
        scan.keep_in(path, on_unsaved)
    except UserError:  # the saved scan is damaged, so this one starts at the beginning
        with contextlib.suppress(OSError):
            path.unlink()
        scan.save, scan.on_unsaved = path, on_unsaved
