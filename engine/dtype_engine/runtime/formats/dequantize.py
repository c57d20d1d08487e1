"""Dequantizes codes with scales: the values are codes times scales, computed in float32 and rounded once to the target dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import Blocks, matrices
from dtype_engine.runtime.formats.blocks import chunks, spread
from dtype_engine.runtime.formats.row_blocks import Rows, chunk_elements, parallel_map, row_slices


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of the values in a dtype of `core.dtypes`, or of the codes in a format with scales such as "nvfp4"."""
    dtype = getattr(torch, dtypes.BY_NAME[name].torch_name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, such as `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class Workspace:
    """Buffers for casting a large tensor some rows at a time. Touching new memory would take longer than the arithmetic."""

    cast: torch.Tensor
    values: torch.Tensor
    half: torch.Tensor

    @classmethod
    def like(cls, shape: torch.Size, dtype: str, wide: torch.dtype, device: torch.device | str = "cpu") -> Workspace:
        """Return new buffers for at most `shape` values at a time, which are cast to `dtype` and back to `wide`."""
        made = partial(torch.empty, shape, device=device)
        return cls(made(dtype=torch_dtype(dtype)), made(dtype=wide), made(dtype=torch.int16))

    def first(self, count: int) -> Workspace:
        """Return a workspace of the first `count` rows or elements of these buffers, as views."""
        return Workspace(self.cast[:count], self.values[:count], self.half[:count])


def dequantize_block(codes: torch.Tensor, scale: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
    """Return codes multiplied by a scale, which is broadcast, as float32 values. workspace: buffers to use instead of new memory.

    On the CPU, torch converts float8 one element at a time. Shifting the bits of float8 to float16 gives the same values ten times
    as fast: e5m2 is the upper byte of float16, and the exponent bias of e4m3fn is smaller by 8.
    """
    bits = codes.contiguous().view(torch.int8) if codes.element_size() == 1 else codes
    slow = codes.device.type != "cpu" or codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2)
    e4m3 = codes.dtype == torch.float8_e4m3fn
    # Shifting the bits of e4m3fn's NaN does not give a NaN of float16.
    if slow or (e4m3 and bits.numel() and int((bits & 0x7F).max()) == 0x7F):
        values = codes.to(torch.float32) if workspace is None else workspace.values.copy_(codes)
        return values.mul_(scale)
    half = bits.to(torch.int16) if workspace is None else workspace.half.copy_(bits)
    half.bitwise_left_shift_(7 if e4m3 else 8)
    if e4m3:
        half.bitwise_and_(~0x4000)
    floats = half.view(torch.float16)
    values = floats.to(torch.float32) if workspace is None else workspace.values.copy_(floats)
    # The factor 256 makes up for the exponent bias. A power of two rounds nothing, and amax / 448 leaves room for it.
    return values.mul_(scale * 256.0 if e4m3 else scale)


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, blocks: Blocks | None = None
) -> torch.Tensor:
    """Return the values of `codes` in `dtype`, computed a few rows at a time to save memory. scale: float32 [channels], [rows of
    all matrices] or [1] or, with `blocks` of a block format, [blocks down, blocks across].
    """
    if blocks is not None:
        count, height, width = matrices(codes.shape, blocks.columns)
        return dequantize_blocks(codes.reshape(count * height, width), codes.shape, scale, dtype, blocks)
    several = len(scale) > 1
    rows = codes.reshape(len(scale), codes.numel() // len(scale)) if several else codes.reshape(-1, 1)
    values = torch.empty(rows.shape, dtype=dtype, device=codes.device)
    blocks_of_rows = row_slices(rows)

    def work(indices: Iterable[int]) -> None:
        buffers = Workspace.like(rows[blocks_of_rows[0]].shape, dtype_name(codes.dtype), torch.float32, codes.device)
        for block in map(blocks_of_rows.__getitem__, indices):
            workspace = buffers.first(len(rows[block]))
            values[block] = dequantize_block(rows[block], (scale[block] if several else scale)[:, None], workspace)

    parallel_map(work, len(blocks_of_rows), codes.device)
    return values.view(codes.shape)


def dequantize_blocks(
    rows: Rows, shape: Sequence[int], scale: torch.Tensor, dtype: torch.dtype, blocks: Blocks
) -> torch.Tensor:
    """Return the values of a weight of `shape` in `dtype`. rows: the codes as [rows, width], which are read a few rows at a time in
    several threads. scale: float32 [blocks down, blocks across].
    """
    values = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    width = rows.shape[1]
    pieces = list(chunks(shape, blocks, chunk_elements(rows.device))) if width else []
    one = torch.ones(1, device=rows.device)

    def work(indices: Iterable[int]) -> None:
        for index in indices:
            taken, scales = pieces[index]
            units = dequantize_block(rows[taken], one)
            values[taken] = units.mul_(spread(scale[scales], blocks, len(units), width))

    parallel_map(work, len(pieces), rows.device)
    return values.view(tuple(shape))


def dequantized_rows(
    table: torch.Tensor, scale: torch.Tensor, storage: str, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the rows `ids` of an embedding table [rows, width], dequantized to `dtype`: [*ids.shape, width]. table: its codes.
    scale: as for `dequantize`. storage: the name of the table's format.
    """
    index = ids.reshape(-1)
    rows = table.view(torch.uint8).index_select(0, index).view(table.dtype)
    blocks = dtypes.BY_NAME[storage].blocks
    if blocks is not None:
        rows = dequantize(rows, scale[index // blocks.rows], dtype, msgspec.structs.replace(blocks, rows=1))
    else:
        rows = dequantize(rows, scale[index] if len(scale) == len(table) else scale, dtype)
    return rows.view(*ids.shape, table.shape[1])
