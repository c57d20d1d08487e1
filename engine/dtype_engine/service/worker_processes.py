"""The worker processes that run a part of the work, if the user requested any, and the progress of work that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dtype_engine.core.errors import UserError
from dtype_engine.core.throttle import Throttle
from dtype_engine.core.units import plural
from dtype_engine.service.open_model import OpenModel

if TYPE_CHECKING:
    from dtype_engine.evaluation.work import Over
    from dtype_engine.evaluation.workers import Workers
    from dtype_engine.runtime.session.session import Session

OnProgress = Callable[[str, int, int], None]
"""A function of (the current step in a few words, number of units done, total number of units)."""


class WorkerProcesses:
    """Starts worker processes for an open model when they are first needed, if `Options.workers` is set. Only `close` may be called
    from other threads than the engine worker's. on_notice: called with notes to the user.
    """

    def __init__(self, model: OpenModel, on_notice: Callable[[str], None]) -> None:
        self._model = model
        self._on_notice = on_notice
        self._workers: Workers | None = None

    def close(self) -> None:
        """End the worker processes, or disconnect from the cluster."""
        if self._workers is not None:
            self._workers.close()

    @contextmanager
    def over(self, session: Session, private: int, needed: bool = True) -> Iterator[Over | None]:
        """A context manager that yields the worker processes, which open the session's model, or None if the work should run in
        this process. If the processes fail, they are closed, and the next call starts new ones.

        private: the bytes that each process needs in addition to the mapped checkpoint. needed: whether there is any work.
        """
        workers = self._model.options.workers
        if workers is None or not needed:
            yield None
            return
        from dtype_engine.evaluation.workers import Workers

        if self._workers is None:
            self._workers = Workers(workers, self._on_notice)
        try:
            yield self._workers.over(session, self._model.source, private)
        except UserError:
            self._workers.close()
            raise


def throttled(on_progress: OnProgress) -> Callable[[str, int, int | None], None]:
    """Return a progress callback `(step, done, total)` that calls `on_progress` at most ten times a second."""
    throttle = Throttle()

    def on_step(what: str, done: int, total: int | None) -> None:
        if throttle.due():
            on_progress(what, done, total or max(1, done))

    return on_step


def shared_progress(on_progress: OnProgress, what: str, over: Over | None) -> Callable[[int, int], None]:
    """Return a progress callback `(done, total)` that reports steps such as `scan: 4 workers, 37 of 128`. over: the workers, or
    None.
    """
    by = f"{plural(over.pool.workers, 'worker')}, " if over is not None else ""
    return lambda done, total: on_progress(f"{what}: {by}{done} of {total}", done, total)
