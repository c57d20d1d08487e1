"""Starts the workers that the user requests: processes on this machine, or the workers of a Dask scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.evaluation.pool import ProcessPool, fitting, visible_gpus
from dtype_engine.evaluation.work import Over, opened_as

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.evaluation.cluster import DaskPool
    from dtype_engine.runtime.session.session import Session

_MOST_PROCESSES = 9999


def parse_workers(text: str) -> int | str:
    """Parse `--workers`: a number of processes, or a Dask scheduler such as `tcp://HOST:PORT`. Raises UserError."""
    if text.startswith(("tcp://", "tls://")):
        return text
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= _MOST_PROCESSES:
        raise UserError(
            f"--workers {printable(text, 80)}: give a number of processes from 1 to {_MOST_PROCESSES}, or tcp://HOST:PORT"
        )
    return int(text)


class Workers(AbstractContextManager["Workers"]):
    """Starts workers when they are first needed. They keep their model open until `close`.

    requested: the result of `parse_workers`. on_notice: called with a sentence if fewer workers start than requested. most: the
    number of tasks, if known, which limits the workers.
    """

    def __init__(self, requested: int | str, on_notice: Callable[[str], None], most: int | None = None) -> None:
        self._requested = requested
        self._on_notice = on_notice
        self._most = most
        self._pool: ProcessPool | DaskPool | None = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes on this machine, or disconnect from the cluster."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.__exit__()

    def pool(self, private: int, gpus: tuple[str, ...] = ()) -> ProcessPool | DaskPool:
        """Return the pool of workers, which the first call starts. Raises UserError. private: bytes that each process needs in
        addition to the mapped checkpoint. gpus: one GPU for each process; () on the CPU.
        """
        if self._pool is None:
            if isinstance(self._requested, str):
                from dtype_engine.evaluation.cluster import DaskPool

                self._pool = DaskPool(self._requested, on_gpu=bool(gpus))
            else:
                self._pool = ProcessPool(self._fitting(self._requested, private, gpus), gpus)
        return self._pool

    def _fitting(self, requested: int, private: int, gpus: tuple[str, ...]) -> int:
        """Return how many workers to start: at most one per task or GPU, and as many as fit into memory. If that is fewer than
        `requested`, a notice says why. private: as in `pool`.
        """
        wanted = min(requested, self._most or requested)
        if gpus and len(gpus) < wanted:
            self._on_notice(f"{plural(len(gpus), 'worker')} of the {requested} asked for: one for each GPU")
            wanted = len(gpus)
        fit = fitting(wanted, 0 if gpus else private)
        if fit < wanted:
            self._on_notice(f"the memory that is free holds {plural(fit, 'worker')} of the {requested} asked for")
        return fit

    def threads(self, threads: int | None, private: int) -> int:
        """Return how many threads each worker gets: an equal part of `threads` (None: torch's number) if all workers are on this
        machine, otherwise all. private: as in `pool`.
        """
        from dtype_engine.runtime.session.opening import threads_each

        pool = self.pool(private)
        return threads_each(threads, pool.workers if isinstance(pool, ProcessPool) else 1)

    def over(self, session: Session, source: Source, private: int) -> Over:
        """Start the workers if needed. Returns them with what each of them opens: the session's model and inputs. private: how many
        bytes each process needs beside the mapped checkpoint. Raises UserError.
        """
        from dtype_engine.runtime.device import device_count

        self.pool(private, visible_gpus(device_count(session.model.device)))
        threads = self.threads(session.options.threads, private)
        return Over(self.pool(private), opened_as(session, source, threads), self._on_notice)
