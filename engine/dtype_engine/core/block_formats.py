"""Formats that store one scale for each block of a weight: their tensors, shapes and bytes in a file.

A block is a rectangle of values in a matrix: part of one row, such as 1 x 32 values in MX formats, or values of several rows,
such as 128 x 128 in DeepSeek's fp8.

A vector is a matrix with one row. A weight with three or more dimensions is a stack of matrices, such as experts, if its last
dimension is at least as long as a block is wide. Otherwise, as in a convolution, it is one matrix with a row for each index of
the first dimension.

If a matrix's width or height is not a multiple of the block's, the last blocks are smaller, as in DeepSeek's files: the codes
keep the weight's shape, and the number of scales is rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

ScaleRule = Literal["amax", "even", "floor", "rceil", "compressed-tensors"]
Packing = Literal["none", "nibbles", "words", "six bits"]


class Blocks(msgspec.Struct, frozen=True):
    """The block size, scales and packing of a block format."""

    rows: int
    columns: int
    scale: str
    """torch's name for the dtype of a scale in a file. `uint8` means E8M0: the scale is 2 to the power of (byte - 127)."""
    rule: ScaleRule = "amax"
    """How a scale follows from the largest |value| in its block; `runtime/formats/` defines the rules."""
    tensor_scale: bool = False
    """Whether the whole tensor also has one float32 scale."""
    zero_points: bool = False
    """Whether each block also has an integer zero point."""
    packing: Packing = "none"
    """How codes below 8 bits are packed: two to a byte, as many as fit into 32-bit words, or four in 3 bytes."""
    layout: str = ""
    """The checkpoint layout in which other programs read this format, or "" if there is none."""


class Part(msgspec.Struct, frozen=True):
    """One of the tensors that store a weight in a file, such as its codes or its scales."""

    suffix: str
    """The end of this tensor's name, after the weight's name; "" for the codes."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


CODES, SCALE, SCALE_INV = "", "_scale", "_scale_inv"
TENSOR_SCALE, ZERO_POINT, SHAPE = "_global_scale", "_zero_point", "_shape"
INPUT_SCALE = "input_global_scale"
"""Suffix of the NVFP4 scale of a layer's inputs, 448 * 6 / max |input|, in which 448 and 6 are the largest fp8 and fp4 values."""
_BYTES = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "bfloat16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
}


def matrices(shape: Sequence[int], columns: int) -> tuple[int, int, int]:
    """Return (number of matrices, rows of each, values in a row) of a weight whose rows are divided into blocks of `columns`
    values. With more than two dimensions, the last two form matrices. If the last one is smaller than a block, the weight is one
    matrix instead, with a row for each index of the first dimension.
    """
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if shape[-1] >= columns:
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    return 1, shape[0], math.prod(shape[1:])


def scale_grid(shape: Sequence[int], blocks: Blocks) -> tuple[int, int]:
    """Return (rows, columns) of the tensor of a weight's scales. The scales of several matrices are stacked one below the other."""
    count, rows, width = matrices(shape, blocks.columns)
    return count * -(-rows // blocks.rows), -(-width // blocks.columns)


def divides(shape: Sequence[int], blocks: Blocks) -> bool:
    """Return whether the block size divides the weight's rows and columns, so that all blocks have the full size."""
    _, rows, width = matrices(shape, blocks.columns)
    return width % blocks.columns == 0 and rows % blocks.rows == 0


def packed_width(width: int, bits: int, packing: Packing) -> int:
    """Return the length of a row of `width` codes of `bits` bits in a file: in codes if `packing` is "none", in 32-bit words if it
    is "words", otherwise in bytes.
    """
    if packing == "none":
        return width
    return -(-width * bits // (32 if packing == "words" else 8))


def parts(shape: Sequence[int], blocks: Blocks, bits: int, codes: str) -> tuple[Part, ...]:
    """Return the tensors that store a weight in a file: the codes, the scales, and then further tensors of the format. bits: the
    bits of a code. codes: the dtype of codes that are not packed.
    """
    count, rows, width = matrices(shape, blocks.columns)
    down, across = scale_grid(shape, blocks)
    if blocks.packing == "none":
        found = [_part(CODES, codes, tuple(shape))]
    else:
        packed = "int32" if blocks.packing == "words" else "uint8"
        found = [_part(CODES, packed, (count * rows, packed_width(width, bits, blocks.packing)))]
    found.append(_part(SCALE_INV if blocks.layout == "fp8" else SCALE, blocks.scale, (down, across)))
    if blocks.tensor_scale:
        found.append(_part(TENSOR_SCALE, "float32", (1,)))
    if blocks.zero_points:
        found.append(_part(ZERO_POINT, "int32", (packed_width(down, bits, "words"), across)))
    if blocks.packing == "words":
        found.append(_part(SHAPE, "int64", (len(shape),)))
    return tuple(found)


def _part(suffix: str, dtype: str, shape: tuple[int, ...]) -> Part:
    return Part(suffix, dtype, shape, math.prod(shape) * _BYTES[dtype])
