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
from dtype_engine.runtime.formats.code_packing import unpack, unpack_words
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.formats.schemes.parts import Parts


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """As `schemes.decode`. Only the blocks that contain the rows are dequantized."""
    shape, blocks = weight.shape, dtypes.BY_NAME[weight.format].blocks
    if blocks is None:
        codes, scale = parts[CODES], parts[SCALE].reshape(-1)
        if not shape:
            return dequantize(codes, scale, torch.float32)
        per_channel = len(shape) > 1 and len(scale) == shape[0]
        return dequantize(codes[first:last], scale[first:last] if per_channel else scale, torch.float32)
    if len(shape) < 2 or not math.prod(shape):
        values = _decode_rows(weight, parts, blocks, slice(0, 1), slice(0, 1)).reshape(shape)
        return values[first:last] if shape else values
    count, height, width = matrices(shape, blocks.columns)
    down = -(-height // blocks.rows)
    if len(shape) > 2 and shape[-1] >= blocks.columns:  # an index of the first dimension has whole matrices
        begin, end = first * count // shape[0], last * count // shape[0]
        rows, scales = slice(begin * height, end * height), slice(begin * down, end * down)
        values = _decode_rows(weight, parts, blocks, rows, scales, (end - begin, height, width))
        return values.view(last - first, *shape[1:])
    above = first // blocks.rows
    rows = slice(above * blocks.rows, min(height, -(-last // blocks.rows) * blocks.rows))
    values = _decode_rows(weight, parts, blocks, rows, slice(above, -(-last // blocks.rows)))
    return values[first - rows.start : last - rows.start].reshape(last - first, *shape[1:])


def _decode_rows(
    weight: CodedWeight,
    parts: Parts,
    blocks: Blocks,
    rows: slice,
    scales: slice,
    shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Return some rows of the matrices of which a weight consists. rows: which, counted over all matrices. scales: the rows of
    blocks that these are. shape: the shape of the result, if these are several matrices; by default [rows, width].
    """
    element = dtypes.BY_NAME[weight.format]
    count, height, width = matrices(weight.shape, blocks.columns)
    packed = parts[CODES].reshape(count * height, packed_width(width, element.bits, blocks.packing))[rows]
    codes = unpack(packed, width, element, blocks.packing)
    stored = parts[SCALE_INV if SCALE_INV in parts else SCALE][scales]
    if stored.element_size() == 1 and not blocks.tensor_scale:
        exponents = stored.view(torch.uint8).to(torch.int32)
        scale = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
    else:
        scale = stored.to(torch.float32)
    if blocks.tensor_scale:
        scale = scale / parts[TENSOR_SCALE].to(torch.float32)
    if blocks.zero_points:
        words = parts[ZERO_POINT].t().contiguous()
        zero = unpack_words(words, scale_grid(weight.shape, blocks)[0], element.bits).t()[scales]
        codes = codes - zero.repeat_interleave(blocks.columns, dim=1)[:, :width]
    return dequantize(codes if shape is None else codes.view(shape), scale, torch.float32, blocks)
