"""The workers that a user asked for, as a number of processes or as the address of a scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable
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


def parse_workers(text: str) -> int | str:
    """A number of processes, or `tcp://HOST:PORT`. Raises UserError."""
    if text.startswith(("tcp://", "tls://")):
        return text
    if not re.fullmatch("[0-9]{1,4}", text) or not int(text):
        raise UserError(f"--workers {printable(text, 80)}: give a number of processes, or tcp://HOST:PORT")
    return int(text)


class Workers:
    """They are started when they are first needed, and kept until `close`, each with the model that it has open. A context manager.

    asked: see `parse_workers`. most: how many pieces of work there will be at most, None where nobody knows. on_notice: told where
    there are fewer than were asked for.
    """

    def __init__(self, asked: int | str, on_notice: Callable[[str], None], most: int | None = None) -> None:
        self._asked = asked
        self._on_notice = on_notice
        self._most = most
        self._pool: ProcessPool | DaskPool | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of this machine; a cluster goes on without this."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.__exit__()

    def pool(self, private: int, gpus: tuple[str, ...] = ()) -> ProcessPool | DaskPool:
        """Who evaluates. private: bytes that each process will hold beside the mapped checkpoint. gpus: those that the model runs
        on, one for each process; none on the CPU. Raises UserError.
        """
        if self._pool is None:
            if isinstance(self._asked, str):
                from dtype_engine.evaluation.cluster import DaskPool

                self._pool = DaskPool(self._asked, on_gpu=bool(gpus))
            else:
                self._pool = ProcessPool(self._fitting(self._asked, private, gpus), gpus)
        return self._pool

    def _fitting(self, asked: int, private: int, gpus: tuple[str, ...]) -> int:
        """How many of the workers asked for there will be."""
        wanted = min(asked, self._most or asked)
        if gpus and len(gpus) < wanted:
            self._on_notice(f"{plural(len(gpus), 'worker')} of the {asked} asked for: one for each GPU")
            wanted = len(gpus)
        fit = fitting(wanted, 0 if gpus else private)
        if fit < wanted:
            self._on_notice(f"the memory that is free holds {plural(fit, 'worker')} of the {asked} asked for")
        return fit

    def threads(self, threads: int | None, private: int) -> int:
        """How many threads each has, where this process has `threads` (None: torch's own number) to share. Raises UserError."""
        from dtype_engine.runtime.session.opening import threads_each

        pool = self.pool(private)
        return threads_each(threads, pool.workers if isinstance(pool, ProcessPool) else 1)

    def over(self, session: Session, source: Source, private: int) -> Over:
        """Who evaluates what a session has open. Raises UserError."""
        from dtype_engine.runtime.session.opening import gpu_count

        on_gpu = session.model.device.type == "cuda"
        self.pool(private, visible_gpus(gpu_count()) if on_gpu else ())
        threads = self.threads(session.options.threads, private)
        return Over(self.pool(private), opened_as(session, source, threads), self._on_notice)
