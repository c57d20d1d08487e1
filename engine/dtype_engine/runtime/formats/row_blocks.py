"""A tensor in pieces: rows of it, and work on them in several threads."""

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
"""Elements that are worked on at once: so few that they stay in the cache, so many that Python's share is small."""
_DEVICE_CHUNK = 1 << 22
"""The same on an accelerator, where starting the work on a small chunk takes longer than the work."""
_BLOCKS_WORTH_A_THREAD = 4
_CPU = torch.device("cpu")

T = TypeVar("T")


class Rows(Protocol):
    """Values that need not be in memory: slices of rows (or of elements, of what is flat) are read, in several threads."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def __getitem__(self, block: slice, /) -> torch.Tensor: ...


class Values(Protocol):
    """The part of a tensor's interface that one still in its file has."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def numel(self) -> int: ...

    def reshape(self, *shape: int) -> Rows: ...


@contextmanager
def single_intraop_thread() -> Iterator[None]:
    """Torch on one thread for a while. Blocks are small, and threads that wait for each other after every one of them take
    ten times as long where other programs want the processors too.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chunk_elements(device: torch.device) -> int:
    """About how many elements are worked on at once on a device."""
    return CHUNK if device.type == "cpu" else _DEVICE_CHUNK


def row_slices(rows: Rows | torch.Tensor) -> list[slice]:
    """The whole rows of a matrix (or the elements of what is flat) in chunks of about `chunk_elements`."""
    count = rows.shape[0]
    step = max(1, chunk_elements(rows.device) // max(1, math.prod(rows.shape[1:])))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def row_amax(values: torch.Tensor) -> torch.Tensor:
    """The largest finite |value| of each row of a float32 matrix: float32 [rows]."""
    if not values.shape[1]:
        return values.new_zeros(len(values))
    amax = torch.maximum(values.amax(dim=1), -values.amin(dim=1))
    if not bool(torch.isfinite(amax).all()):
        amax = torch.nan_to_num(values.abs(), 0.0, 0.0, 0.0).amax(dim=1)
    return amax


def finite_amax(tensor: torch.Tensor | Values) -> float:
    """The largest finite |value| of a tensor in float32, 0 of an empty one; a chunk at a time."""
    width = tensor.shape[-1] if len(tensor.shape) > 1 else tensor.numel()
    rows = tensor.reshape(tensor.numel() // width if width else 0, width)
    pieces = row_slices(rows)

    def look(indices: range) -> float:
        return max(float(row_amax(rows[pieces[index]].to(torch.float32)).amax()) for index in indices)

    return max(parallel_map(look, len(pieces), tensor.device), default=0.0)


def parallel_map(work: Callable[[range], T], count: int, device: torch.device = _CPU) -> list[T]:
    """Run `work` on every n-th of `count` blocks in n threads, as many as torch has now, each with one intra-op thread, so that
    a block stays in one core's cache. The split is deterministic, and with it the sums. This thread is one of them, the others
    stay for the next call: threads that were just started share a core for some milliseconds, longer than many calls last.
    On an accelerator, which is parallel within a block, this thread does all of them.

    Raises what `work` raises, once no thread is at it any more.
    """
    most = torch.get_num_threads()
    threads = max(1, min(most, count // _BLOCKS_WORTH_A_THREAD)) if device.type == "cpu" else 1
    with single_intraop_thread():
        if threads == 1:
            return [work(range(count))] if count else []
        pool = _threads_beside(most - 1)
        futures = [pool.submit(work, range(first, count, threads)) for first in range(1, threads)]
        try:
            own = work(range(0, count, threads))
        finally:
            wait(futures)
        return [own, *(future.result() for future in futures)]


@cache
def _threads_beside(count: int) -> ThreadPoolExecutor:
    """So many threads, each with as many intra-op threads as torch has when it is given its first work."""
    return ThreadPoolExecutor(count, thread_name_prefix="blocks")


os.register_at_fork(after_in_child=_threads_beside.cache_clear)  # threads do not come along


@overload
def as_rows(tensor: torch.Tensor) -> torch.Tensor: ...


@overload
def as_rows(tensor: torch.Tensor | Values) -> Rows: ...


def as_rows(tensor: torch.Tensor | Values) -> Rows:
    """[channels, the rest] for two dimensions and above, [1, elements] otherwise."""
    if len(tensor.shape) >= 2:
        return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    return tensor.reshape(1, tensor.numel())
