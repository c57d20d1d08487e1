"""Quantizes to block formats independently of the exporter, to check its results. This file uses tables and numpy, follows the
definitions in the docstrings of `runtime/formats/`, and shares no code with that package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import Blocks, matrices

_AT_ONCE = 1 << 22
"""Maximum number of elements that are computed at once."""


def quantize_blocks_independently(
    values: torch.Tensor, dtype: str, shared: float | None = None
) -> tuple[torch.Tensor, ...]:
    """Quantize a weight to a block format. Returns the tensors that a file must hold for it, in the order of
    `core.block_formats.parts`.

    shared: the largest finite |value| of all weights that have a common tensor scale with this one; if None, this weight has its
    own tensor scale.
    """
    row = dtypes.BY_NAME[dtype]
    blocks = row.blocks
    assert blocks is not None
    count, height, width = matrices(values.shape, blocks.columns)
    rows = values.reshape(count, height, width)
    step = max(1, _AT_ONCE // max(1, width * blocks.rows)) * blocks.rows
    of_tensor = (
        _tensor_scale(finite_largest(values) if shared is None else shared) if blocks.tensor_scale else np.float32(1)
    )
    codes, scales, zeros = [], [], []
    for matrix in rows if width else ():
        for start in range(0, height, step):
            part = matrix[start : start + step].to(torch.float32).numpy()
            scale, shown, zero = _scales(part, row, blocks, of_tensor)
            codes.append(_codes(part, row, blocks, scale, zero))
            scales.append(shown)
            zeros.append(zero)
    all_codes = np.concatenate(codes) if codes else np.zeros((count * height, width), np.uint8)
    across = -(-width // blocks.columns)
    found = [_packed(all_codes, row, blocks)]
    down = count * -(-height // blocks.rows)
    stored = np.concatenate(scales) if scales else np.zeros((down, across), np.float32)
    if blocks.packing == "none":
        found = [found[0].view(torch.float8_e4m3fn).reshape(values.shape)]
    scale_dtype = getattr(torch, blocks.scale)
    found.append(
        torch.from_numpy(stored).view(scale_dtype)
        if stored.dtype == np.uint8
        else torch.from_numpy(stored).to(scale_dtype)
    )
    if blocks.tensor_scale:
        found.append(torch.from_numpy(np.array([of_tensor], np.float32)))
    if blocks.zero_points:
        zero = np.concatenate(zeros) if zeros else np.zeros((down, across), np.int64)
        found.append(_words((zero + 8).T, 4).t().contiguous())
    if blocks.packing == "words":
        found.append(torch.tensor(tuple(values.shape), dtype=torch.int64))
    return tuple(found)


def candidate_scales(
    values: torch.Tensor, dtype: str, factors: Sequence[float], shared: float | None = None
) -> list[tuple[Any, Any, Any]]:
    """Return the scales that a weight may have if the range of each of its blocks is multiplied by one of `factors`: for each
    factor, as arrays [blocks down, blocks across], (the factors by which codes are multiplied, the scales as a file stores them,
    and the zero points or None). shared: as for `quantize_blocks_independently`.
    """
    row = dtypes.BY_NAME[dtype]
    blocks = row.blocks
    assert blocks is not None
    count, height, width = matrices(values.shape, blocks.columns)
    matrix = values.reshape(count * height, width).to(torch.float32).numpy()
    assert blocks.rows == 1
    largest = finite_largest(values) if shared is None else shared
    of_tensor = _tensor_scale(largest) if blocks.tensor_scale else np.float32(1)
    return [_scales(matrix * np.float32(factor), row, blocks, of_tensor) for factor in factors]


def decoded_independently(
    tensors: Sequence[torch.Tensor], dtype: str, shape: Sequence[int]
) -> tuple[torch.Tensor, Any, Any]:
    """Decode the tensors that a file holds for a weight in a block format. Returns (its values, float32 in `shape`; its scales as
    the file stores them, [blocks down, blocks across]; its zero points or None).
    """
    row = dtypes.BY_NAME[dtype]
    blocks = row.blocks
    assert blocks is not None
    assert blocks.rows == 1
    count, height, width = matrices(shape, blocks.columns)
    codes, scale, *rest = tensors
    stored = scale.view(torch.uint8).numpy() if scale.dtype == torch.uint8 else scale.to(torch.float32).numpy()
    factor = np.ldexp(1.0, stored.astype(np.int64) - 127).astype(np.float32) if stored.dtype == np.uint8 else stored
    if blocks.tensor_scale:
        factor = factor / rest[0].numpy()
    zero = None
    if blocks.zero_points:
        zero = _codes_in_words(rest[0].t().contiguous(), 4, len(factor)).T.astype(np.int64) - 8
    units = _units(_unpacked(codes, row, blocks, count * height, width), row)
    from_zero = 0.0 if zero is None else _spread(zero, blocks, width)
    values = (units - from_zero).astype(np.float32) * _spread(factor, blocks, width)
    return torch.from_numpy(values.astype(np.float32)).reshape(tuple(shape)), stored, zero


def _spread(of_blocks: Any, blocks: Blocks, width: int) -> Any:
    return np.repeat(of_blocks, blocks.columns, axis=1)[:, :width]


def _unpacked(codes: torch.Tensor, element: dtypes.DType, blocks: Blocks, rows: int, width: int) -> Any:
    """Return the codes before packing, as `_codes` returns them: uint8 [rows, width]."""
    if blocks.packing == "nibbles":
        packed = codes.view(torch.uint8).numpy().reshape(rows, -1)
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)[:, :width]
    if blocks.packing == "words":
        return _codes_in_words(codes, element.bits, width)
    return codes.view(torch.uint8).numpy().reshape(rows, width)


def _codes_in_words(words: torch.Tensor, bits: int, width: int) -> Any:
    packed = words.numpy().view(np.uint32)
    parts = [(packed >> np.uint32(bits * index)) & np.uint32((1 << bits) - 1) for index in range(32 // bits)]
    return np.stack(parts, axis=-1).reshape(len(packed), -1)[:, :width]


def _units(codes: Any, element: dtypes.DType) -> Any:
    """Return the numbers that codes before packing mean, without scales: float64."""
    if element.kind == "int":
        return codes.astype(np.float64) - (1 << (element.bits - 1))
    sign = 1 << (element.bits - 1)
    values = _values("float8_e4m3fn" if element.bits == 8 else element.name.partition(":")[0])
    table = np.full(sign, np.nan)
    table[: len(values)] = values
    return np.where(codes & sign, -1.0, 1.0) * table[codes & (sign - 1)]


def finite_largest(values: torch.Tensor) -> float:
    """Return the largest finite |value| of a tensor, or 0 if the tensor is empty."""
    finite = torch.where(torch.isfinite(values), values, 0).to(torch.float32).abs()
    return finite.max().item() if finite.numel() else 0.0


def _tensor_scale(largest: float) -> Any:
    with np.errstate(over="ignore"):
        scale = np.float32(1) / max(np.float32(largest), np.finfo(np.float32).tiny) * np.float32(448 * 6)
    if not np.isfinite(scale):
        return np.float32(1)
    # With a smaller tensor scale, an element of 6 in a block of scale 448 would be infinite.
    return max(scale, np.float32(448 * 6 / float(np.finfo(np.float32).max) * (1 + 2**-22)))


def _in_blocks(matrix: Any, blocks: Blocks) -> Any:
    height, width = matrix.shape
    more = (-height % blocks.rows, -width % blocks.columns)
    padded = np.pad(matrix, ((0, more[0]), (0, more[1])))
    return padded.reshape(-1, blocks.rows, padded.shape[1] // blocks.columns, blocks.columns)


def _scales(matrix: Any, element: dtypes.DType, blocks: Blocks, of_tensor: Any) -> tuple[Any, Any, Any]:
    """Compute the scales of a matrix's blocks. Returns three arrays [blocks down, blocks across]: the factors by which codes are
    multiplied, the scales as a file stores them, and the zero points (None for a format of floats). of_tensor: the scale of the
    whole tensor in NVFP4.
    """
    each = np.where(np.isfinite(matrix), matrix, np.float32(0))
    each = _in_blocks(each, blocks)
    low, high = each.min(axis=(1, 3)), each.max(axis=(1, 3))
    amax = np.maximum(-low, high)
    if blocks.zero_points:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        with np.errstate(over="ignore"):
            span = high - low
        wide = np.where(np.isfinite(span), span / np.float32(15), high / np.float32(15) - low / np.float32(15))
        with np.errstate(divide="ignore", invalid="ignore"):
            zero = np.clip(np.float32(-8) - low / wide, -8, 7)
        rounded = _bfloat16(wide)
        return rounded, rounded, np.rint(np.nan_to_num(zero, nan=0.0)).astype(np.int64)
    if element.kind == "int":
        rounded = _bfloat16(amax / np.float32(7.5 if element.bits == 4 else 127.5))
        return rounded, rounded, np.zeros(amax.shape, np.int64)
    if blocks.tensor_scale:
        wide = np.minimum(amax / np.float32(6) * of_tensor, np.float32(448))
        shown = _values("float8_e4m3fn")[_nearest(wide, "float8_e4m3fn")].astype(np.float32)
        shown = np.where(shown == 0, np.float32(0.125), shown)
        return shown / of_tensor, shown, None
    if blocks.scale == "float32":
        scale = amax / np.float32(448)
        with np.errstate(over="ignore"):
            scale = np.where(np.isinf(scale * np.float32(448)), np.nextafter(scale, np.float32(0)), scale)
        scale = np.where(scale == 0, np.float32(2.0**-23), scale)
        return scale, scale, None
    fraction, exponent = np.frexp(amax.astype(np.float64))
    mantissa = fraction * 2
    top, highest = math.frexp(element.max)
    up = {
        "floor": np.zeros(amax.shape, bool),
        "rceil": mantissa > top * 2,
        "even": mantissa >= 2 - 2.0 ** -(element.mantissa + 1),
        "compressed-tensors": mantissa >= 1.75,
    }[blocks.rule]
    byte = np.clip(exponent - highest + up + 127, 0, 255 - highest)
    byte = np.where(amax == 0, 127 if blocks.rows > 1 else 0, byte)
    return np.ldexp(1.0, byte - 127).astype(np.float32), byte.astype(np.uint8), None


def _codes(matrix: Any, element: dtypes.DType, blocks: Blocks, scale: Any, zero: Any) -> Any:
    """Return the codes of a matrix before packing, uint8 [rows, width]: the bits of floats, or integers minus the smallest possible
    integer. scale, zero: the factors and the zero points that `_scales` returns.
    """
    height, width = matrix.shape
    with np.errstate(over="ignore"):
        quotient = _in_blocks(matrix, blocks) / scale[:, None, :, None].astype(np.float32)
    if element.kind == "int":
        least = -(1 << (element.bits - 1))
        shifted = np.nan_to_num(quotient, nan=0.0, posinf=np.inf, neginf=-np.inf) + zero[:, None, :, None].astype(
            np.float32
        )
        from_zero = zero[:, None, :, None]
        with np.errstate(over="ignore"):
            most = np.floor(np.finfo(np.float32).max / scale[:, None, :, None])
        units = np.clip(np.rint(np.clip(shifted, least, -least - 1)) - from_zero, -most, most)
        found = units + from_zero - least
    else:
        name = "float8_e4m3fn" if element.bits == 8 else element.name
        index = _nearest(np.minimum(np.abs(quotient), np.float32(element.max)), name)
        found = index + (np.signbit(quotient) & ~np.isnan(quotient)) * (1 << (element.bits - 1))
        found = np.where(np.isnan(quotient), 0x7F if element.bits == 8 else 0, found)
    rows = found.reshape(-1, found.shape[2] * found.shape[3])
    return rows[:height, :width].astype(np.uint8)


def _values(name: str) -> Any:
    """Return all nonnegative values of a small float format, indexed by their codes."""
    element = dtypes.BY_NAME[name]
    bias = 7 if name == "float8_e4m3fn" else (1 << (element.exponent - 1)) - 1
    steps = 1 << element.mantissa
    magnitudes = [
        code / steps * 2.0 ** (1 - bias) if code < steps else (1 + code % steps / steps) * 2.0 ** (code // steps - bias)
        for code in range(steps << element.exponent)
    ]
    return np.array([value for value in magnitudes if value <= element.max])


def _nearest(magnitudes: Any, name: str) -> Any:
    """Return for each magnitude the code of the nearest value in a float format, the even one in a tie, any for NaN."""
    values = _values(name)
    between = (values[1:] + values[:-1]) / 2
    index = np.searchsorted(between, magnitudes)
    tie = (index < len(between)) & (between[np.minimum(index, len(between) - 1)] == magnitudes)
    return np.minimum(np.where(tie & (index % 2 == 1), index + 1, index), len(values) - 1)


def _packed(codes: Any, element: dtypes.DType, blocks: Blocks) -> torch.Tensor:
    if blocks.packing == "nibbles":
        padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
        return torch.from_numpy(padded[:, 0::2] + 16 * padded[:, 1::2])
    if blocks.packing == "words":
        return _words(codes, element.bits)
    return torch.from_numpy(codes)


def _words(codes: Any, bits: int) -> torch.Tensor:
    per_word = 32 // bits
    padded = np.pad(codes.astype(np.uint64), ((0, 0), (0, -codes.shape[1] % per_word)))
    parts = padded.reshape(len(codes), padded.shape[1] // per_word, per_word)
    words = sum(parts[:, :, index] << np.uint64(bits * index) for index in range(per_word))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def _bfloat16(values: Any) -> Any:
    """Round values to bfloat16, half to even, and return them as float32. Values that round to 0 become bfloat16's epsilon."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)) << np.uint64(16)
    found = rounded.astype(np.uint32).view(np.float32)
    return np.where(found == 0, np.float32(2.0**-7), found)
