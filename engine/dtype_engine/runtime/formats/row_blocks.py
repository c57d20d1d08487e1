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

_BLOCKS_WORTH_A_THREAD = 4

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


def parallel_map(work: Callable[[range], T], count: int) -> list[T]:
    """Run `work` on every n-th of `count` blocks in n threads, as many as torch has now, each with one intra-op thread, so that
    a block stays in one core's cache. The split is deterministic, and with it the sums. This thread is one of them, the others
    stay for the next call: threads that were just started share a core for some milliseconds, longer than many calls last.

    Raises what `work` raises, once no thread is at it any more.
    """
    most = torch.get_num_threads()
    threads = max(1, min(most, count // _BLOCKS_WORTH_A_THREAD))
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
