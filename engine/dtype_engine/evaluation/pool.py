"""Runs evaluations on an executor. Results come in any order, and the work of a process that ends is done again."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures import CancelledError as FutureCancelled
from itertools import islice
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import BaseContext
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Protocol

import psutil

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.memory_share import share_memory
from dtype_engine.evaluation.evaluate import cancel_by, evaluate
from dtype_engine.evaluation.specs import Evaluated, Evaluation

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.1
_MOST_BREAKS = 3
"""How many times in a row the workers may end without a result."""
_PROCESS_BYTES = 700 << 20
"""The memory of a process besides the model: Python, torch and transformers, and the outputs of small modules."""


class Pool(Protocol):
    """Something that runs evaluations on its workers."""

    workers: int

    def results(
        self, evaluations: Sequence[Evaluation], cancelled: IsCancelled = never
    ) -> Iterator[tuple[int, Evaluated]]:
        """Run the evaluations, and yield the index and the result of each as soon as it is done. Raises UserError, Cancelled."""


class ProcessPool:
    """Processes of this machine that each open the model from the mapped files, so that they share its pages. A context manager.

    gpus: names of GPUs as in `CUDA_VISIBLE_DEVICES`; each process uses one of them.
    """

    def __init__(self, workers: int, gpus: tuple[str, ...] = ()) -> None:
        self.workers = workers
        self._gpus = gpus
        self._context = _context()
        self._stop = self._context.Event()
        self._executor: Executor | None = None

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def results(
        self, evaluations: Sequence[Evaluation], cancelled: IsCancelled = never
    ) -> Iterator[tuple[int, Evaluated]]:
        """As `Pool.results`. If a process is killed, its work is done again."""
        self._stop.clear()
        try:
            yield from results(self._started, self._broken, evaluations, cancelled, 2 * self.workers)
        except BaseException:
            self._stop.set()  # each evaluation stops at its next module call
            raise

    def _started(self) -> Executor:
        if self._executor is None:
            started = self._context.Value("i", 0)
            given = (self._stop, self.workers, started, self._gpus)
            self._executor = ProcessPoolExecutor(self.workers, self._context, initializer=_start_worker, initargs=given)
        return self._executor

    def _broken(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._executor = None


def _context() -> BaseContext:
    """How processes are started. This process is never forked, because torch's threads would not survive that. On Linux a server
    process imports torch, computes nothing, and is forked: that saves the seconds of the import and shares its pages. The server
    has one thread, which belongs to numpy's OpenBLAS; OpenBLAS ends it before a fork and starts another after it.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dtype_engine.runtime.session.preload"])
    return context


def results(
    started: Callable[[], Executor],
    broken: Callable[[], None],
    evaluations: Sequence[Evaluation],
    cancelled: IsCancelled,
    ahead: int,
) -> Iterator[tuple[int, Evaluated]]:
    """Submit evaluations to the executor that `started()` returns, and yield their results. If the executor breaks, `broken()` is
    called and the unfinished evaluations are submitted to a new one. ahead: how many are submitted at a time; a pause or a stop has
    to wait for these.
    """
    waiting = dict(enumerate(evaluations))
    breaks = 0
    while waiting:
        futures: dict[Future[Evaluated], int] = {}
        before = len(waiting)
        try:
            executor = started()
            unsubmitted = iter(list(waiting.items()))
            while True:
                for index, evaluation in islice(unsubmitted, ahead - len(futures)):
                    futures[executor.submit(evaluate, evaluation)] = index
                if not futures:
                    break
                for future in _finished(futures, cancelled):
                    result = future.result()
                    index = futures.pop(future)
                    del waiting[index]
                    yield index, result
        except (BrokenExecutor, FutureCancelled):
            breaks = breaks + 1 if len(waiting) == before else 0
            if breaks == _MOST_BREAKS:
                raise UserError(
                    f"the worker processes ended {breaks} times without a result; with fewer workers each has more memory"
                ) from None
            broken()
        finally:
            for future in futures:
                future.cancel()


def _finished(futures: dict[Future[Evaluated], int], cancelled: IsCancelled) -> Iterator[Future[Evaluated]]:
    """Wait until a future is done, and yield all that are done, those with a result first."""
    done: set[Future[Evaluated]] = set()
    while not done:
        if cancelled():
            raise Cancelled
        done, _ = wait(futures, _POLL_S, FIRST_COMPLETED)
    yield from sorted(done, key=lambda future: future.cancelled() or future.exception() is not None)


def fitting(workers: int, private: int) -> int:
    """How many of `workers` processes fit in memory. Each needs `private` bytes besides the checkpoint, which they share."""
    free = psutil.virtual_memory().available
    return max(1, min(workers, math.floor(free / (private + _PROCESS_BYTES))))


def visible_gpus(count: int, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The names of the `count` GPUs that this process sees: those in `CUDA_VISIBLE_DEVICES` (numbers or UUIDs), or numbers."""
    named = [name.strip() for name in environment.get(VISIBLE_GPUS, "").split(",") if name.strip()]
    return tuple(named[:count]) if named else tuple(map(str, range(count)))


def assigned(index: int, gpus: tuple[str, ...], environment: MutableMapping[str, str] = os.environ) -> None:
    """Make one GPU visible to this process, the `index`-th of its pool. CUDA must not be initialized. No GPUs: change nothing."""
    if gpus:
        environment[VISIBLE_GPUS] = gpus[index % len(gpus)]


def _start_worker(stop: Event, workers: int, started: Synchronized[int], gpus: tuple[str, ...]) -> None:
    """Prepare a new worker process: it takes the next GPU, ignores interrupts, and ends when the process that started it ends.
    started: how many processes of the pool have started before.
    """
    with started.get_lock():
        index, started.value = started.value, started.value + 1
    assigned(index, gpus)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    share_memory(workers)
    cancel_by(stop.is_set)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            wait_for([parent.sentinel])
        os._exit(1)
