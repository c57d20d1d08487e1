"""Runs a model that is larger than memory block by block: the values that a block reads are kept only until the next block begins.

A block is a module whose weights are read together, such as a layer. While a block runs, the operating system is asked to read the
pages of the next block. After a block, the system is told that its pages are no longer needed, so that it does not evict others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

from dtype_engine.checkpoint import ByteRange, CheckpointTensor
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled
from dtype_engine.core.system_memory import trim_heap
from dtype_engine.runtime.formats.row_blocks import stopping
from dtype_engine.runtime.weights.copies_ahead import CopiesAhead
from dtype_engine.runtime.weights.source import WeightSource

T = TypeVar("T")

SMALLEST = 1 << 16
"""Weights of fewer bytes, such as those of a norm, stay in memory."""
BLOCKS = 16
"""The memory is divided into this many parts. Each block of the model, in float32, takes at most one part."""
MOST_KEPT = 8
"""Values of the current block are kept until they take as much memory as this many blocks. Beyond that, values are read or computed
at each use.
"""
_STEP = 1 << 17
"""How many bytes are requested at once from the operating system. Linux serves at most a device's largest transfer per request."""


class MemoryBudget:
    """Keeps the weights that the current block has read or computed, and reads the next block's pages ahead. A model that fits into
    memory has no blocks, and is not limited.

    Attributes:
        blocks: the ranges of the files that each block reads, keyed by the name of its module. `use_blocks` sets it.
        most: how many bytes a block takes at most, in float32, or 0 without a limit.
        keeps_pages: True if the files stay in memory, because only an accelerator's memory is too small for the weights.
        copies: transfers to the accelerator, in advance, what the next block read in its last visit; None if the device can't.
        cancelled: called before a block reads values. If it returns True, Cancelled is raised.
        bytes_read: how many bytes all blocks have read since the last measurement began; a block counts each time that it runs.
        inside: the name of the current block, or "" outside of all blocks.
    """

    def __init__(self, most: int = 0, keeps_pages: bool = False, copies: CopiesAhead | None = None) -> None:
        self.blocks: dict[str, tuple[ByteRange, ...]] = {}
        self.most = most
        self.keeps_pages = keeps_pages
        self.copies = copies
        self.cancelled: IsCancelled = never
        self.bytes_read = 0
        self.inside = ""
        self._values: dict[Any, Any] = {}
        self._counted: set[Any] = set()
        self._kept = 0
        self._used: dict[int, WeightSource] = {}
        self._reads: dict[str, dict[Any, Callable[[], Any]]] = {}
        """What each block read to the accelerator in its last visit, keyed by the name of its module."""
        self._before = ""
        self._next: dict[tuple[str, str], str] = {}
        """The next block by (previous block, current block), so that backward and forward passes have an order each."""
        self._asked = ""
        self._reader: ThreadPoolExecutor | None = None

    @property
    def limited(self) -> bool:
        """Whether the model is larger than memory, and runs block by block."""
        return self.most > 0

    def use_blocks(self, blocks: Mapping[str, tuple[ByteRange, ...]]) -> None:
        """Set `blocks`, in the order in which a forward pass is expected to reach them."""
        self.blocks = dict(blocks)
        names = list(blocks)
        around = list(zip(["", *names], names, [*names[1:], ""], strict=False))
        self._next = {(before, name): after for before, name, after in around if after}
        self._next |= {(after, name): before for before, name, after in around if before}

    def enter(self, name: str) -> None:
        """End the current block and begin the block `name`. Then read ahead for this block and for the block that is expected
        next: ask the operating system for their pages (unless `keeps_pages`), and begin to copy to the accelerator what they read
        last time (if `copies` is set).
        """
        if name == self.inside:
            return
        if self.inside:
            self._next[self._before, self.inside] = name
        self._before = self.inside
        self._end_block()
        if self.copies is not None:
            self.copies.keep(name)
        self.inside = name
        self.bytes_read += sum(part.nbytes for part in self.blocks[name])
        if self._asked != name:
            self._ask(name)
        following = self._next.get((self._before, name))
        if following is not None:
            self._ask(following)
        self._reads[name] = {}

    def leave(self) -> None:
        """End the current block, and forget what was copied ahead for the next one."""
        self._end_block()
        if self.copies is not None:
            self.copies.keep()
            self._asked = ""

    def _end_block(self) -> None:
        ranges = set(self.blocks.get(self.inside, ()))
        for values in self._used.values():
            values.release()
            ranges |= set(ranges_of(values.in_files))
        self._values.clear()
        self._counted.clear()
        self._kept = 0
        self._used.clear()
        inside, self.inside = self.inside, ""
        if inside and not self.keeps_pages:
            _each_file(ranges, _forget)
            trim_heap()  # passes run side by side in threads, and glibc keeps freed memory for each

    def once(self, key: Any, make: Callable[[], T], values: WeightSource, ahead: bool = False) -> T:
        """Return the result of `make`. Inside a block, the result is kept under `key`, so that `make` is called only once until the
        block ends. values: the source from which `make` reads. ahead: whether `make` only reads, so that it may be called before
        the block's next visit, in another thread.
        """
        if not self.inside:
            return make()
        self.note_use(values)
        if key in self._values:
            return self._values[key]  # type: ignore[no-any-return]
        if self.cancelled():
            raise Cancelled
        # A cast takes seconds. `cancelled` is looked up anew each time, because an interrupt replaces it during the cast.
        with stopping(lambda: self.cancelled()):
            if ahead and self.copies is not None:
                self._reads[self.inside][key] = make
                made = self.copies.take(self.inside, key, make)
            else:
                made = make()
        parts = made if isinstance(made, tuple) else (made,)
        self._kept += sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
        if self._kept <= MOST_KEPT * self.most:
            self._values[key] = made
        return made

    def count(self, key: Any, nbytes: int) -> None:
        """Add `nbytes` to `bytes_read`, for bytes that the current block reads beyond its ranges in `blocks`. Within one visit, a
        key is counted only once.
        """
        if key not in self._counted:
            self._counted.add(key)
            self.bytes_read += nbytes

    def note_use(self, values: WeightSource) -> None:
        """Note that the current block uses `values`, so that the pages that `values` reads are released when the block ends."""
        self._used[id(values)] = values

    def _ask(self, name: str) -> None:
        if self.copies is not None:
            self._asked = name
            self.copies.start(name, self._reads.get(name, {}))
        if self.keeps_pages or not hasattr(os, "posix_fadvise"):
            return
        self._asked = name
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "reads ahead")
        self._reader.submit(_each_file, self.blocks[name], _want)


def ranges_of(tensors: Iterable[CheckpointTensor]) -> Iterable[ByteRange]:
    """Yield the ranges of bytes in the files that hold the given tensors."""
    for tensor in tensors:
        if tensor.start is not None and tensor.nbytes:
            yield ByteRange(tensor.file, tensor.start, tensor.nbytes)


def blocks_of(
    module: nn.Module, in_files: Mapping[int, tuple[CheckpointTensor, ...]], most: int
) -> dict[str, tuple[ByteRange, ...]]:
    """Divide a module into blocks: the largest submodules that take at most `most` bytes in float32. A larger submodule is a block
    if most of its weights are its own rather than its submodules'. Returns the ranges of the files that each block reads, keyed by
    the name of its module. Embeddings, and stacked experts that are larger than a block, are left out of the ranges, because a
    forward pass may read only some of their rows or experts.

    in_files: the headers of each weight that is read from files, keyed by the `id` of its tensor in the module.
    """
    blocks: dict[str, tuple[ByteRange, ...]] = {}
    seen: set[int] = set()

    def divide(name: str, child: nn.Module) -> None:
        if id(child) in seen:
            return
        seen.add(id(child))
        weights = {id(tensor): tensor for tensor in (*child.parameters(), *child.buffers()) if id(tensor) in in_files}
        if not weights:
            return
        size = sum(tensor.numel() for tensor in weights.values())
        children = dict(child.named_children())
        own = sum(weights[id(t)].numel() for t in (*child.parameters(False), *child.buffers(False)) if id(t) in weights)
        called = type(child) not in (nn.ModuleList, nn.ModuleDict)
        if name and called and (4 * size <= most or 2 * own > size):
            looked_up = isinstance(child, nn.Embedding)
            whole = (
                key for key, each in weights.items() if not looked_up and (each.ndim < 3 or 4 * each.numel() <= most)
            )
            blocks[name] = tuple(ranges_of(file for key in whole for file in in_files[key]))
            return
        for part, inner in children.items():
            divide(f"{name}.{part}" if name else part, inner)

    divide("", module)
    return blocks


def _each_file(ranges: Iterable[ByteRange], advise: Callable[[int, int, int], None]) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    by_file: dict[str, list[tuple[int, int]]] = {}
    for each in ranges:
        by_file.setdefault(str(each.file), []).append((each.start, each.start + each.nbytes))
    for file, spans in by_file.items():
        with suppress(OSError), open(file, "rb", buffering=0) as opened:  # reading the values raises the error
            for start, end in _joined(spans):
                advise(opened.fileno(), start, end - start)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _want(descriptor: int, start: int, nbytes: int) -> None:
    for at in range(start, start + nbytes, _STEP):
        os.posix_fadvise(descriptor, at, min(_STEP, start + nbytes - at), os.POSIX_FADV_WILLNEED)


def _forget(descriptor: int, start: int, nbytes: int) -> None:
    os.posix_fadvise(descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)
