"""Runs evaluations on a Dask cluster that the user has started. Each worker opens the model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError, one_line
from dtype_engine.evaluation.pool import results
from dtype_engine.evaluation.specs import Evaluated, Evaluation

_CONNECT_S = 10
"""The maximum number of seconds for each step: connecting, and each answer of the scheduler to it."""
_ANSWER_S = 20
"""The maximum number of seconds for all steps until a client is connected."""
_AHEAD = 8
"""The maximum number of unfinished evaluations submitted for each worker. The rest is left for workers that join later."""


class DaskPool(AbstractContextManager["DaskPool"]):
    """The workers of a running Dask scheduler at `tcp://HOST:PORT`. on_gpu: use only workers that offer a GPU (`--resources
    GPU=1`).

    Raises UserError if `distributed` is not installed, no scheduler answers in time, or it has no suitable workers.
    """

    def __init__(self, address: str, on_gpu: bool = False) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise UserError("--workers tcp://... needs Dask: pip install 'dtype-tui[cluster]'") from None
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are reported by UserError instead
        self.address = address

        class BoundedClient(Client):  # type: ignore[misc]
            """A client whose `timeout` is not only for connecting, but also for the scheduler's first answer, and which closes
            soon, also if it is closed by the garbage collector.
            """

            def start(self, **options: Any) -> None:
                super().start(callback_timeout=_ANSWER_S, **options)

            def close(self, timeout: float = 1) -> None:
                with contextlib.suppress(Exception):  # closing fails where the scheduler is gone
                    super().close(timeout=timeout)

        try:
            self._client: Any = BoundedClient(address, timeout=_CONNECT_S, set_as_default=False)
            # `scheduler_info` would wait without end. Without -1 some versions list only five workers.
            told = self._client.sync(self._client.scheduler.identity, n_workers=-1, callback_timeout=_CONNECT_S)
            found = told["workers"].values()
        except TimeoutError:
            raise UserError(
                f"no Dask scheduler answers at {address} within {_ANSWER_S} s: see whether one listens there, and works"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"no Dask scheduler answers at {address}: {one_line(error)}") from None
        except Exception as error:  # Dask trusts every length and field that it receives, so this may be of any type
            raise UserError(
                f"what answers at {address} is no Dask scheduler, or one of another version: {one_line(error, with_type=True)}"
            ) from None
        self.workers = sum(1 for worker in found if not on_gpu or worker.get("resources", {}).get("GPU"))
        wanted: dict[str, Any] = {"resources": {"GPU": 1}} if on_gpu else {}
        self._executor: Executor = self._client.get_executor(pure=False, **wanted)
        if not self.workers:
            self.__exit__()
            lacks = "no worker with a GPU" if on_gpu else "no workers"
            raise UserError(
                f"the scheduler at {address} has {lacks}; dtype-engine worker {address} says how to start one"
            )

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    def results(
        self, evaluations: Sequence[Evaluation], cancelled: IsCancelled = never
    ) -> Iterator[tuple[int, Evaluated]]:
        """Run the evaluations, and yield (index, result) of each as soon as it is done. If a worker dies, Dask repeats its
        evaluations. `cancelled` does not stop evaluations that are running. Raises UserError, Cancelled.
        """
        from distributed.scheduler import KilledWorker

        try:
            yield from results(lambda: self._executor, self._raise_lost, evaluations, cancelled, _AHEAD * self.workers)
        except KilledWorker as error:
            raise UserError(f"the workers of {self.address} end while they work: {one_line(error)}") from None

    def _raise_lost(self) -> None:
        """Raise a UserError which says that the scheduler has ended, the only reason for which Dask cancels evaluations."""
        raise UserError(
            f"the scheduler at {self.address} is gone; with --save, the same command goes on from what was done"
        )


def worker_lines(address: str) -> str:
    """Return shell commands that start Dask workers on any machine that has the same files under the same paths."""
    worker = f"dask worker {address} --nworkers 1 --nthreads 1 --no-dashboard"
    return "\n".join(
        [
            f"a worker here       {worker}",
            f"on a GPU            CUDA_VISIBLE_DEVICES=0 {worker} --resources GPU=1",
            f"sixteen by Slurm    srun --ntasks 16 {worker}",
            "the scheduler       dask scheduler --port 8786",
            f"then                dtype-engine scan MODEL --workers {address} --save scan.json",
            "OMP_NUM_THREADS=1 before the last gives every worker one thread. All need the same dtype-tui[cluster].",
        ]
    )
