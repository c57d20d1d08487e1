"""Writes safetensors files in blocks, so that memory holds only one block of a tensor for each thread. The safetensors library
would need all tensors of a file in memory at once. All sizes are known in advance, so the header can be written first.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dtype_engine.checkpoint import ByteRange, FileIdentity, Watch
from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.export.contents import ExportTensor, TensorEntry
from dtype_engine.runtime.export.gptq_tensors import gptq_tensors
from dtype_engine.runtime.formats.blocks import BlockWork, Chunk
from dtype_engine.runtime.formats.code_packing import pack
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.formats.quantize_blocks import quantize_chunks, scale_tensors
from dtype_engine.runtime.formats.row_blocks import finite_amax, single_intraop_thread
from dtype_engine.runtime.formats.scales import Scales
from dtype_engine.runtime.numerics.overflow_underflow import LossCounter
from dtype_engine.runtime.numerics.quantize import quantize_in_blocks
from dtype_engine.runtime.weights.files import read_range
from dtype_engine.runtime.weights.pieces import Pieces

OnBytes = Callable[[int, int], None]
"""A callback with the number of bytes written so far and the total number."""
_BLOCK = 1 << 20
"""The number of bytes of a tensor that are cast and written at once. They fit into a processor's cache."""
_MOST_THREADS = 4
"""The maximum number of threads that write a file. More threads would mostly wait for the disk, and each has its own buffers."""
_LOOK_S = 0.2
"""How many seconds, at most, the main thread waits for the writing threads before it lets Python handle a signal such as Ctrl-C."""


class Progress:
    """Counts the bytes that all threads have written. After each block, it calls `on_bytes(done, total)`, raises Cancelled if the
    export is cancelled, and raises UserError if any of the source's `files` has changed.
    """

    def __init__(
        self,
        total: int,
        on_bytes: OnBytes,
        cancelled: IsCancelled,
        files: Iterable[FileIdentity] = (),
    ) -> None:
        self.done = 0
        self.total = total
        self._on_bytes = on_bytes
        self._stopped = False
        self._lock = threading.Lock()
        self._cancelled = cancelled
        self._watch = Watch(files)

    def wrote(self, size: int) -> None:
        with self._lock:
            self.done += size
            self._on_bytes(self.done, self.total)
        if self._stopped or self._cancelled():
            raise Cancelled
        self._watch.look()

    def stop(self) -> None:
        self._stopped = True


def header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes with which a safetensors file begins (the header's length and the header), and the file offset at which
    each tensor begins, by name.

    The order of the tensors is that of the safetensors library: the widest dtypes first, so that every tensor is aligned, and by
    name within a dtype. metadata: the header's entry `__metadata__`.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    at = 0
    for entry in sorted(entries, key=lambda entry: (-dtypes.BY_NAME[entry.dtype].bits, entry.name)):
        table[entry.name] = {
            "dtype": dtypes.BY_NAME[entry.dtype].safetensors,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        starts[entry.name] = at
        at += entry.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    body = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: body + start for name, start in starts.items()}


def write_file(
    path: Path,
    items: Sequence[ExportTensor],
    metadata: Mapping[str, str],
    progress: Progress,
    lost: list[ValueLoss] | None = None,
) -> None:
    """Write a safetensors file with the weights `items`. Several threads each write one weight at a time.

    metadata: the header's entry `__metadata__`. lost: a list that gets an entry for each weight whose cast makes values infinite
    or zero, or saturates them. The order of the entries is arbitrary. If None, such values are not counted. Raises Cancelled,
    UserError and OSError.
    """
    head, starts = header([entry for item in items for entry in item.entries], metadata)
    threads = min(_MOST_THREADS, torch.get_num_threads())
    with open(path, "wb", buffering=0) as file:
        _write(file.fileno(), head, 0)
        write = partial(_write_item, _Target(file.fileno(), progress), starts, lost)
        # New threads inherit the number of torch threads that is set here.
        with single_intraop_thread(), ThreadPoolExecutor(threads) as pool:
            try:
                for future in [pool.submit(write, item) for item in items]:
                    while wait([future], _LOOK_S).not_done:
                        pass
                    future.result()
            except BaseException:
                progress.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


@dataclass(frozen=True, slots=True)
class _Target:
    """An open file descriptor to which several threads write, and the progress of the export."""

    file: int
    progress: Progress

    def put(self, block: torch.Tensor, at: int) -> None:
        """Write a tensor's bytes at the file offset `at`. Raises Cancelled, UserError and OSError."""
        data = _as_bytes(block)
        _write(self.file, data.numpy().data, at)
        self.progress.wrote(len(data))


def _write_item(out: _Target, starts: Mapping[str, int], lost: list[ValueLoss] | None, item: ExportTensor) -> None:
    """Write the tensors that store a weight. starts: the file offset of each tensor, by name. lost: gets an entry if the cast makes
    values infinite or zero, or saturates them; if None, they are not counted.
    """
    offsets = [starts[entry.name] for entry in item.entries]
    if item.input_scale is not None:
        assert item.input_scale.value is not None, item.name
        out.put(torch.tensor([item.input_scale.value]), offsets.pop())
    if item.source_bytes or item.copied:
        for source, at in zip(item.source_bytes, offsets, strict=True):
            _copy(source, out, at)
        return
    stored: torch.Tensor | Pieces = item.source.read() if item.source.plain else Pieces(item.source)
    values, given = (stored, None) if item.rounded is None else item.rounded.read()
    counter = LossCounter(item.name, stored, item.dtype) if lost is not None and item.dtype != item.stored else None
    if item.file_layout is not None and item.file_layout.packed:
        see = ignore if counter is None else counter.see
        for tensor, at in zip(gptq_tensors(values, item, given, see), offsets, strict=True):
            _write_bytes(tensor, out, at)
    elif item.has_scales:
        write = _write_blocks if item.dtype in dtypes.BLOCK_FORMATS else _write_codes
        write(values, item, offsets, out, counter, given)
    else:
        _write_tensor(values, torch_dtype(item.dtype), out, offsets[0], counter)
    if lost is not None and counter is not None and (loss := counter.result()) is not None:
        lost.append(loss)


def _write_tensor(
    values: torch.Tensor | Pieces, dtype: torch.dtype, out: _Target, at: int, counter: LossCounter | None
) -> None:
    """Cast `values` to `dtype` and write them from the file offset `at` on, a block at a time. Casts are elementwise, so the block
    size does not change the result. counter: counts the values that the cast makes infinite or zero; None to count nothing.
    """
    if isinstance(values, torch.Tensor) and values.dtype == dtype:
        _write_bytes(values, out, at)
        return
    flat = values.reshape(-1)
    count, stored = values.numel(), values.dtype
    step = max(1, min(count, _BLOCK // max(stored.itemsize, dtype.itemsize)))
    # torch casts bfloat16 to float16 one element at a time, but both of them to and from float32 eight at a time.
    wide = torch.empty(step) if stored == torch.bfloat16 and dtype == torch.float16 else None
    cast = torch.empty(step, dtype=dtype)
    for start in range(0, count, step):
        block = flat[start : start + step]
        if wide is not None:
            block = wide[: len(block)].copy_(block)
        done = cast[: len(block)].copy_(block)
        if counter is not None:
            counter.see(start, done, block)
        out.put(done, at + start * dtype.itemsize)


def _write_bytes(tensor: torch.Tensor, out: _Target, at: int) -> None:
    data = _as_bytes(tensor)
    for start in range(0, len(data), _BLOCK):
        out.put(data[start : start + _BLOCK], at + start)


def _write_codes(
    tensor: torch.Tensor | Pieces,
    item: ExportTensor,
    offsets: Sequence[int],
    out: _Target,
    counter: LossCounter | None,
    given: Scales | None,
) -> None:
    """Quantize a tensor to a format without blocks, and write its codes, one byte each, and its scales at the file `offsets`.
    given: the scales, or None to compute them from the values.
    """

    def write(start: int, codes: torch.Tensor) -> None:
        if counter is not None:
            counter.see(start, codes)
        out.put(codes, offsets[0] + start)

    out.put(quantize_in_blocks(tensor, item.dtype, write, _scale_amax(item), given), offsets[1])


def _scale_amax(item: ExportTensor) -> float | None:
    """Return the |value| from which the scale of the whole tensor is computed, or None for the largest of the values to write."""
    if item.shared is not None:
        return item.shared.amax()
    return None if item.rounded is None else finite_amax(Pieces(item.source))


def _write_blocks(
    tensor: torch.Tensor | Pieces,
    item: ExportTensor,
    offsets: Sequence[int],
    out: _Target,
    counter: LossCounter | None,
    given: Scales | None,
) -> None:
    """Quantize a tensor to a block format, and write the tensors that store it at the file `offsets`, the codes first. given: the
    scales, or None to compute them from the values.
    """
    element = dtypes.BY_NAME[item.dtype]
    assert element.blocks is not None
    packing = element.blocks.packing
    found: dict[int, Scales] = {}

    def write(_: BlockWork, chunk: Chunk) -> None:
        codes = chunk.codes(element)
        if counter is not None:
            counter.see(chunk.first * codes.shape[1], codes.reshape(-1))
        packed = pack(chunk.file_codes(element), element, packing)
        found[chunk.first_scale] = chunk.scales
        out.put(packed, offsets[0] + chunk.first * packed.shape[1] * packed.element_size())

    of_tensor = quantize_chunks(tensor, item.dtype, write, _scale_amax(item), given)
    rest = scale_tensors([found[first] for first in sorted(found)], of_tensor, tuple(tensor.shape), item.dtype)
    for part, at in zip(rest, offsets[1:], strict=True):
        _write_bytes(part, out, at)


def _copy(source: ByteRange, out: _Target, at: int) -> None:
    """Copy the bytes of a tensor from a source file to the file offset `at` of `out`."""
    for start in range(0, source.nbytes, _BLOCK):
        out.put(read_range(source, torch.uint8, start, min(_BLOCK, source.nbytes - start)), at + start)


def copy_file(source: Path, target: Path, progress: Progress) -> None:
    """Copy the file `source` to `target`. Raises UserError if it can't be read, OSError if it can't be written, and Cancelled."""
    whole = ByteRange(source, 0, source.stat().st_size)
    with open(target, "wb", buffering=0) as out:
        _copy(whole, _Target(out.fileno(), progress), 0)


def _write(out: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(out, view, at)
        view, at = view[written:], at + written


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
