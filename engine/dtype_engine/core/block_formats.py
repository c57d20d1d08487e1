"""Formats in which blocks of a weight share a scale: what they are made of and what they take in a file. Without torch.

A weight is seen as matrices: a vector is one row; of three dimensions and above the last one is the row where a block fits in
it (the experts of a layer), else all but the first are (a convolution). Blocks lie along the row. Where no block divides a
matrix, the last ones are shorter, as in DeepSeek's files: codes keep the weight's shape, and the number of scales is rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ScaleRule = Literal["amax", "even", "floor", "rceil", "compressed-tensors"]
Packing = Literal["none", "nibbles", "words", "six bits"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the elements of a format share scales.

    rows, columns: of a block. scale: the dtype of a scale in a file, by torch's name (`uint8` is an exponent of two plus 127,
    E8M0). rule: how a scale follows from the largest |value| of its block; see the format's file in `runtime/formats/`.
    tensor_scale: one float32 for the whole tensor besides. zero_points: an integer for each block besides. packing: how codes of
    less than a byte lie in a file. layout: the name of the layout that others read, "" where there is none.
    """

    rows: int
    columns: int
    scale: str
    rule: ScaleRule = "amax"
    tensor_scale: bool = False
    zero_points: bool = False
    packing: Packing = "none"
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a weight in a file. suffix: what its name has behind that of the weight; "" for the codes."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


CODES, SCALE, SCALE_INV, TENSOR_SCALE, ZERO_POINT, SHAPE = (
    "",
    "_scale",
    "_scale_inv",
    "_global_scale",
    "_zero_point",
    "_shape",
)
INPUT_SCALE = "input_global_scale"
"""The name beside a weight's of the float32 that NVFP4 has for the inputs of its layer: 448 * 6 / their largest |value|."""
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
    """A weight as matrices whose rows hold blocks of `columns`: (how many, rows of each, width of a row)."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if shape[-1] >= columns:
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    return 1, shape[0], math.prod(shape[1:])


def scale_grid(shape: Sequence[int], blocks: Blocks) -> tuple[int, int]:
    """How many scales a weight has: (down, across). Those of several matrices stand below each other."""
    count, rows, width = matrices(shape, blocks.columns)
    return count * -(-rows // blocks.rows), -(-width // blocks.columns)


def divides(shape: Sequence[int], blocks: Blocks) -> bool:
    """Whether blocks fill a weight, so that none is shorter than the others."""
    _, rows, width = matrices(shape, blocks.columns)
    return width % blocks.columns == 0 and rows % blocks.rows == 0


def packed_width(width: int, bits: int, packing: Packing) -> int:
    """The elements of the packed dtype that a row of `width` codes takes."""
    if packing == "none":
        return width
    return -(-width * bits // (32 if packing == "words" else 8))


def parts(shape: Sequence[int], blocks: Blocks, bits: int, codes: str) -> tuple[Part, ...]:
    """What a weight of `shape` is made of in a file: codes, then scales and what else there is.

    codes: the dtype of codes that are not packed.
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
