"""Processes a tensor some rows at a time, in several threads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Protocol, TypeVar

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled

CHUNK = 1 << 19
"""About how many elements a CPU thread processes at once: they fit in its cache, and are enough to keep Python's overhead small."""
_DEVICE_CHUNK = 1 << 22
"""About how many elements an accelerator processes at once. With fewer, launching kernels would take longer than running them."""
_BLOCKS_WORTH_A_THREAD = 4
_CPU = torch.device("cpu")

T = TypeVar("T")

_cancelled: ContextVar[IsCancelled] = ContextVar("cancelled", default=never)


class Rows(Protocol):
    """A matrix or a flat tensor, perhaps in a file, that several threads may read by slices of its first dimension."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def __getitem__(self, block: slice, /) -> torch.Tensor: ...


class Values(Protocol):
    """What torch tensors and `Pieces` (a weight that is read some rows at a time) have in common."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def numel(self) -> int: ...

    def reshape(self, *shape: int) -> Rows: ...


@contextmanager
def stopping(cancelled: IsCancelled) -> Iterator[None]:
    """In the `with` block, let a `parallel_map` that this thread calls raise Cancelled as soon as `cancelled()` is True."""
    before = _cancelled.set(cancelled)
    try:
        yield
    finally:
        _cancelled.reset(before)


@contextmanager
def single_intraop_thread() -> Iterator[None]:
    """Let torch run each operation on one thread during the `with` block. It is meant for operations on small groups of rows: if
    threads wait for each other after every such operation, they take ten times as long while other programs use the processors.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chunk_elements(device: torch.device) -> int:
    """Return about how many elements of a tensor are processed at once on `device`."""
    return CHUNK if device.type == "cpu" else _DEVICE_CHUNK


def row_slices(rows: Rows | torch.Tensor) -> list[slice]:
    """Return slices that divide a matrix or a flat tensor into groups of rows of about `chunk_elements(device)` elements."""
    count = rows.shape[0]
    step = max(1, chunk_elements(rows.device) // max(1, math.prod(rows.shape[1:])))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def row_amax(values: torch.Tensor) -> torch.Tensor:
    """Return the largest finite |value| of each row of a float32 matrix: float32 [rows]."""
    if not values.shape[1]:
        return values.new_zeros(len(values))
    amax = torch.maximum(values.amax(dim=1), -values.amin(dim=1))
    if not bool(torch.isfinite(amax).all()):
        amax = torch.nan_to_num(values.abs(), 0.0, 0.0, 0.0).amax(dim=1)
    return amax


def finite_amax(tensor: torch.Tensor | Values) -> float:
    """Return the largest finite |value| of a tensor, computed in float32 some rows at a time, or 0 if it is empty."""
    width = tensor.shape[-1] if len(tensor.shape) > 1 else tensor.numel()
    rows = tensor.reshape(tensor.numel() // width if width else 0, width)
    pieces = row_slices(rows)

    def look(indices: Iterable[int]) -> float:
        return max(float(row_amax(rows[pieces[index]].to(torch.float32)).amax()) for index in indices)

    return max(parallel_map(look, len(pieces), tensor.device), default=0.0)


def parallel_map(work: Callable[[Iterable[int]], T], count: int, device: torch.device = _CPU) -> list[T]:
    """Process the indexes 0 to `count - 1`, for example of groups of rows, in n threads. Each thread calls `work` once, with an
    iterator over every n-th index. Returns the results, in the order of the threads.

    n is at most torch's thread count. Inside `work`, torch uses one thread for each operation, so that the rows stay in one core's
    cache. The division, and with it every sum, is deterministic. The calling thread is one of the n threads. The others are kept
    for the next call, since newly started threads share a core for some milliseconds. On an accelerator, which computes in
    parallel itself, the calling thread does all of the work.

    Raises what `work` raises, and Cancelled (see `stopping`), after all threads have finished.
    """
    cancelled = _cancelled.get()

    def until_cancelled(indices: range) -> Iterator[int]:
        for index in indices:
            if cancelled():
                raise Cancelled
            yield index

    most = torch.get_num_threads()
    threads = max(1, min(most, count // _BLOCKS_WORTH_A_THREAD)) if device.type == "cpu" else 1
    with single_intraop_thread():
        if threads == 1:
            return [work(until_cancelled(range(count)))] if count else []
        pool = _worker_threads(most - 1)
        futures = [pool.submit(work, until_cancelled(range(first, count, threads))) for first in range(1, threads)]
        try:
            own = work(until_cancelled(range(0, count, threads)))
        finally:
            wait(futures)
        return [own, *(future.result() for future in futures)]


@cache
def _worker_threads(count: int) -> ThreadPoolExecutor:
    """Return the pool of `count` threads, which is made once. torch fixes a thread's intra-op threads when the thread starts."""
    return ThreadPoolExecutor(count, thread_name_prefix="blocks")


os.register_at_fork(after_in_child=_worker_threads.cache_clear)  # a forked process has none of the threads


def as_rows(tensor: torch.Tensor | Values, dtype: str | None = None) -> Rows:
    """Return a view of a tensor as a matrix: [channels, everything else], or [1, elements] if it has fewer than two dimensions. If
    the format `dtype` has a scale for each row, the matrix is [rows, values of a row].
    """
    if len(tensor.shape) >= 2:
        by_row = dtype is not None and dtypes.BY_NAME[dtype].scales == "row"
        count = math.prod(tensor.shape[:-1]) if by_row else tensor.shape[0]
        return tensor.reshape(count, tensor.shape[-1] if by_row else math.prod(tensor.shape[1:]))
    return tensor.reshape(1, tensor.numel())
