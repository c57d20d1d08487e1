"""Runs evaluations on an executor. Results come in any order. If a worker dies, other workers repeat its evaluations."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures import CancelledError as FutureCancelled
from contextlib import AbstractContextManager
from itertools import islice
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import BaseContext
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from multiprocessing.util import get_temp_dir

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.system_memory import free_memory, share_memory
from dtype_engine.evaluation.evaluate import cancel_by, evaluate
from dtype_engine.evaluation.specs import Evaluated, Evaluation

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
"""The environment variables that say which GPUs a process sees: of CUDA and ROCm, and of Intel (XPU)."""
_TO_PROGRAM = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2) if sys.platform != "win32" else ()
"""Signals that a terminal or a batch system sends to this program and to all processes that it has started. This program alone
answers them.
"""
_POLL_S = 0.1
_MOST_BREAKS = 3
"""The pool gives up after the workers have died this many times in a row without finishing a single evaluation."""
_PROCESS_BYTES = 700 << 20
"""Estimated bytes of a worker process in addition to the model: Python, torch, transformers, small outputs."""


class ProcessPool(AbstractContextManager["ProcessPool"]):
    """Starts worker processes on this machine, which map the model's files and so share one copy of the weights. gpus: the
    names of the GPUs to use, such as `("0", "1")`; each process uses one of them.
    """

    def __init__(self, workers: int, gpus: tuple[str, ...] = ()) -> None:
        self.workers = workers
        self._gpus = gpus
        self._context = _context()
        self._stop = self._context.Event()
        self._executor: Executor | None = None

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._shut_down()

    def results(
        self, evaluations: Sequence[Evaluation], cancelled: IsCancelled = never
    ) -> Iterator[tuple[int, Evaluated]]:
        """Run the evaluations, and yield (index, result) of each as soon as it is done. If a process is killed, unfinished
        evaluations run in new processes. Raises UserError, Cancelled.
        """
        self._stop.clear()
        try:
            yield from results(self._started, self._shut_down, evaluations, cancelled, 2 * self.workers)
        except BaseException:
            self._stop.set()  # each evaluation stops at its next module call
            raise

    def _started(self) -> Executor:
        if self._executor is None:
            started = self._context.Value("i", 0)
            given = (self._stop, self.workers, started, self._gpus, get_temp_dir())
            self._executor = ProcessPoolExecutor(self.workers, self._context, initializer=_start_worker, initargs=given)
        return self._executor

    def _shut_down(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._executor = None


def _context() -> BaseContext:
    """Return the multiprocessing context that starts worker processes. It never forks this process, because torch's threads
    would not survive a fork.

    On Linux, workers are forked from a server process that has imported torch and computed nothing, which saves the seconds of
    the import and memory. The server's only other thread is OpenBLAS's, which ends before a fork.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dtype_engine.runtime.session.preload"])
    # Processes inherit the blocked signals. Without this, a hang-up ends the tracker of semaphores, and the next one prints a
    # traceback for each semaphore that it does not know.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_PROGRAM)
    try:
        resource_tracker.ensure_running()
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def results(
    started: Callable[[], Executor],
    broken: Callable[[], None],
    evaluations: Sequence[Evaluation],
    cancelled: IsCancelled,
    ahead: int,
) -> Iterator[tuple[int, Evaluated]]:
    """Run evaluations on an executor, and yield (index, result) of each as soon as it is done.

    started: returns the executor. broken: called if the executor breaks, for example because a process was killed. Unfinished
    evaluations are then submitted to the executor that `started` returns next. ahead: the maximum number of submitted evaluations
    that are unfinished; a pause takes effect only after all of them are done. Raises UserError, Cancelled.
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
    """Wait until at least one future is done, and yield the done ones: first those with a result, then those with an error. Raises
    Cancelled.
    """
    done: set[Future[Evaluated]] = set()
    while not done:
        if cancelled():
            raise Cancelled
        done, _ = wait(futures, _POLL_S, FIRST_COMPLETED)
    yield from sorted(done, key=lambda future: future.cancelled() or future.exception() is not None)


def fitting(workers: int, private: int) -> int:
    """Return how many of `workers` processes fit into free memory, at least 1. private: bytes of each without the shared files."""
    return max(1, min(workers, math.floor(free_memory() / (private + _PROCESS_BYTES))))


def visible_gpus(count: int, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of the first `count` GPUs: ("2", "3") if `CUDA_VISIBLE_DEVICES` is "2,3"; ("0", "1") if it is not set."""
    listed = next((environment[name] for name in VISIBLE_GPUS if environment.get(name)), "")
    named = [name.strip() for name in listed.split(",") if name.strip()]
    return tuple(named[:count]) if named else tuple(map(str, range(count)))


def assigned(index: int, gpus: tuple[str, ...], environment: MutableMapping[str, str] = os.environ) -> None:
    """Set environment variables so that this process, number `index` of the pool, sees one GPU. It must not have used any yet."""
    if gpus:
        environment.update(dict.fromkeys(VISIBLE_GPUS, gpus[index % len(gpus)]))


def _start_worker(stop: Event, workers: int, started: Synchronized[int], gpus: tuple[str, ...], sockets: str) -> None:
    """Prepare a new worker process: give it its GPU, make it ignore signals that the program answers, and end it with its parent.

    stop: set to cancel the evaluations. workers: the number of processes that share the machine's memory. started: the number of
    processes that the pool has started before. sockets: the parent's temporary folder, which is removed if the parent was killed.
    """
    with started.get_lock():
        index, started.value = started.value, started.value + 1
    assigned(index, gpus)
    for number in (signal.SIGINT, *_TO_PROGRAM):
        signal.signal(number, signal.SIG_IGN)
    share_memory(workers)
    cancel_by(stop.is_set)
    threading.Thread(target=_end_with_parent, args=(sockets,), daemon=True).start()


def _end_with_parent(sockets: str) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            wait_for([parent.sentinel])
        shutil.rmtree(sockets, ignore_errors=True)
        os._exit(1)
