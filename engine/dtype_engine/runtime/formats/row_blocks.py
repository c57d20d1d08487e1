"""Working on a tensor in several threads, a piece at a time. A piece consists of whole rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import Protocol, TypeVar, overload

import torch

CHUNK = 1 << 19
"""Number of elements in a piece: some rows of a tensor that a thread processes at once. The elements are few enough to stay in the
processor's cache, and many enough to keep Python's overhead small.
"""
_DEVICE_CHUNK = 1 << 22
"""Number of elements in a piece (some rows of a tensor that are processed at once) on an accelerator. Launching the work on a
smaller piece would take longer than the work itself.
"""
_BLOCKS_WORTH_A_THREAD = 4
_CPU = torch.device("cpu")

T = TypeVar("T")


class Rows(Protocol):
    """A matrix or a flat tensor whose rows or elements are read by slicing, possibly from a file and in several threads."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def __getitem__(self, block: slice, /) -> torch.Tensor: ...


class Values(Protocol):
    """The interface that torch tensors and `FileValues` (a tensor in a file) have in common."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def numel(self) -> int: ...

    def reshape(self, *shape: int) -> Rows: ...


@contextmanager
def single_intraop_thread() -> Iterator[None]:
    """While the block runs, let torch run each operation on one thread. The block works on small pieces of tensors; threads that
    wait for each other after every operation take ten times as long if other programs use the processors at the same time.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chunk_elements(device: torch.device) -> int:
    """Return the approximate number of elements in a piece: some rows of a tensor that are processed at once on `device`."""
    return CHUNK if device.type == "cpu" else _DEVICE_CHUNK


def row_slices(rows: Rows | torch.Tensor) -> list[slice]:
    """Return slices that divide a matrix by rows, or a flat tensor by elements, into pieces of about `chunk_elements(device)`
    elements.
    """
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
    """Return the largest finite |value| of a tensor in float32, or 0 if it is empty. The tensor is read some rows at a time."""
    width = tensor.shape[-1] if len(tensor.shape) > 1 else tensor.numel()
    rows = tensor.reshape(tensor.numel() // width if width else 0, width)
    pieces = row_slices(rows)

    def look(indices: range) -> float:
        return max(float(row_amax(rows[pieces[index]].to(torch.float32)).amax()) for index in indices)

    return max(parallel_map(look, len(pieces), tensor.device), default=0.0)


def parallel_map(work: Callable[[range], T], count: int, device: torch.device = _CPU) -> list[T]:
    """Divide the indexes below `count` among n threads, call `work` once in each thread with its indexes, and return the results.
    An index stands, for example, for one piece of a tensor (some rows). Each call gets every n-th index, as a range.

    n is at most torch's thread count. Each thread has one intra-op thread, so that a piece stays in one core's cache. The division
    into pieces, and with it every sum, is deterministic. The calling thread is one of the n threads. The others are kept for the
    next call, since newly started threads share a core for some milliseconds, longer than many calls take. On an accelerator, which
    works on a piece in parallel, the calling thread does all of the work.

    Raises what `work` raises, after all threads have finished.
    """
    most = torch.get_num_threads()
    threads = max(1, min(most, count // _BLOCKS_WORTH_A_THREAD)) if device.type == "cpu" else 1
    with single_intraop_thread():
        if threads == 1:
            return [work(range(count))] if count else []
        pool = _worker_threads(most - 1)
        futures = [pool.submit(work, range(first, count, threads)) for first in range(1, threads)]
        try:
            own = work(range(0, count, threads))
        finally:
            wait(futures)
        return [own, *(future.result() for future in futures)]


@cache
def _worker_threads(count: int) -> ThreadPoolExecutor:
    """Return a pool of `count` threads; equal calls return the same pool. A new thread takes over the number of intra-op threads
    that torch has at that time, and keeps this number later.
    """
    return ThreadPoolExecutor(count, thread_name_prefix="blocks")


os.register_at_fork(after_in_child=_worker_threads.cache_clear)  # a forked process has none of the threads


@overload
def as_rows(tensor: torch.Tensor) -> torch.Tensor: ...


@overload
def as_rows(tensor: torch.Tensor | Values) -> Rows: ...


def as_rows(tensor: torch.Tensor | Values) -> Rows:
    """Return a view of a tensor of two or more dimensions as [channels, everything else], and any other tensor as [1, elements]."""
    if len(tensor.shape) >= 2:
        return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    return tensor.reshape(1, tensor.numel())
