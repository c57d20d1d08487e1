"""Decodes weights that an export of this program stores with scales, in a format of `core.dtypes`."""

from __future__ import annotations

import math

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import (
    SCALE,
    SCALE_INV,
    TENSOR_SCALE,
    ZERO_POINT,
    Blocks,
    matrices,
    packed_width,
    scale_grid,
)
from dtype_engine.core.dtypes import DType
from dtype_engine.runtime.formats.code_packing import unpack, unpack_words
from dtype_engine.runtime.formats.dequantize import dequantize, dequantize_blocks
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import scale_values


def decode(
    weight: CodedWeight, parts: Parts, first: int, last: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the values of a weight of our own export from `first` up to `last` along its first dimension, rounded once to `dtype`.
    Only the blocks that contain these rows are dequantized.
    """
    shape, blocks = weight.shape, dtypes.BY_NAME[weight.format].blocks
    if blocks is None:
        codes, scale = parts[CODES], parts[SCALE].reshape(-1)
        if not shape:
            return dequantize(codes, scale, dtype)
        if len(scale) > 1:
            each = len(scale) // shape[0]
            scale = scale[first * each : last * each]
        return dequantize(codes[first:last], scale, dtype)
    if len(shape) < 2 or not math.prod(shape):
        values = _decode_rows(weight, parts, blocks, (0, 1), (0, 1), shape, dtype)
        return values[first:last] if shape else values
    count, height, width = matrices(shape, blocks.columns)
    down = -(-height // blocks.rows)
    if len(shape) > 2 and shape[-1] >= blocks.columns:  # an index of the first dimension has whole matrices
        begin, end = first * count // shape[0], last * count // shape[0]
        rows, scales = (begin * height, end * height), (begin * down, end * down)
        return _decode_rows(weight, parts, blocks, rows, scales, (last - first, *shape[1:]), dtype)
    above, below = first // blocks.rows, -(-last // blocks.rows)
    start, stop = above * blocks.rows, min(height, below * blocks.rows)
    values = _decode_rows(weight, parts, blocks, (start, stop), (above, below), (stop - start, width), dtype)
    return values[first - start : last - start].reshape(last - first, *shape[1:])


class _Codes:
    """Packed codes, which are unpacked when they are sliced by rows: [rows, width]. zero: the zero point of each block, or None."""

    def __init__(self, packed: torch.Tensor, width: int, element: DType, zero: torch.Tensor | None) -> None:
        self.shape, self.device = torch.Size((len(packed), width)), packed.device
        self._packed, self._element, self._zero = packed, element, zero

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        blocks, width = self._element.blocks, self.shape[1]
        assert blocks is not None
        codes = unpack(self._packed[rows], width, self._element, blocks.packing)
        if self._zero is None:
            return codes
        return codes - self._zero[rows].repeat_interleave(blocks.columns, dim=1)[:, :width]


def _decode_rows(
    weight: CodedWeight,
    parts: Parts,
    blocks: Blocks,
    rows: tuple[int, int],
    scales: tuple[int, int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return some rows of a weight's matrices, in `shape`. rows: the (first, end) of these rows. scales: the (first, end) of their
    rows in the grid of scales. Both are numbered through all matrices.
    """
    element = dtypes.BY_NAME[weight.format]
    count, height, width = matrices(weight.shape, blocks.columns)
    packed = parts[CODES].reshape(count * height, packed_width(width, element.bits, blocks.packing))
    stored = parts[SCALE_INV if SCALE_INV in parts else SCALE][slice(*scales)]
    scale = scale_values(stored)
    if blocks.tensor_scale:
        scale = scale / parts[TENSOR_SCALE].to(torch.float32)
    zero = None
    if blocks.zero_points:  # blocks of one row
        words = parts[ZERO_POINT].t().contiguous()
        zero = unpack_words(words, scale_grid(weight.shape, blocks)[0], element.bits).t()[slice(*scales)]
    codes = _Codes(packed[slice(*rows)], width, element, zero)
    return dequantize_blocks(codes, shape, scale, dtype, blocks)
