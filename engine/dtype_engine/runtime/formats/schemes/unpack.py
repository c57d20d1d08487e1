"""Turns codes, as the files of other programs pack them, into float32 values. A weight is decoded at every use, so each function
is a few operations on memory that the processor's cache holds: torch's own conversion of float8 takes five times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from dtype_engine.core import dtypes

Unpack = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], None]
"""Writes the values of some rows of codes, as the file packs them, to float32 memory [rows, columns]. The last argument is the
weight's `settings`.
"""


def write_plain(codes: torch.Tensor, out: torch.Tensor, settings: Mapping[str, Any]) -> None:
    """Write codes of which each is an element of its own: float8 or int8."""
    if codes.dtype == torch.float8_e4m3fn:
        _write_e4m3(codes, out)
    elif codes.dtype == torch.float8_e5m2:  # the upper byte of a float16
        out.copy_(codes.view(torch.uint8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16))
    else:
        out.copy_(codes)


def _write_e4m3(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Write float8_e4m3fn. Its bits, moved to sign, exponent and mantissa of a float16, are its value / 256, subnormal values
    included. Only NaN would become 480.
    """
    raw = codes.view(torch.uint8)
    bits = raw.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    out.copy_(bits.view(torch.float16)).mul_(256)
    magnitudes = raw & 0x7F
    if raw.numel() and int(magnitudes.amax()) == 0x7F:
        out.masked_fill_(magnitudes == 0x7F, torch.nan)


@cache
def _values_of(element: str) -> torch.Tensor:
    """Return the values of all codes of a float of 4 or 6 bits, float32 [codes]: sign, exponent, mantissa, and no NaN."""
    row = dtypes.BY_NAME[element]
    bits, bias = 1 + row.exponent + row.mantissa, (1 << (row.exponent - 1)) - 1
    codes = torch.arange(1 << bits)
    mantissa = (codes & ((1 << row.mantissa) - 1)) / (1 << row.mantissa)
    exponent = (codes >> row.mantissa) & ((1 << row.exponent) - 1)
    magnitude = torch.where(exponent == 0, mantissa * 2.0, 1 + mantissa) * 2.0 ** (exponent - bias)
    return torch.where(codes >> (bits - 1) == 1, -magnitude, magnitude).to(torch.float32)


@cache
def _e2m1_pairs(high_first: bool) -> torch.Tensor:
    """Return the two e2m1 values of each byte as two float16, which one int32 holds: int32 [256]."""
    values, codes = _values_of("nvfp4").to(torch.float16), torch.arange(256)
    low, high = values[codes & 0xF], values[codes >> 4]
    return torch.stack((high, low) if high_first else (low, high), 1).view(torch.int32).flatten()


def write_e2m1(codes: torch.Tensor, out: torch.Tensor, settings: Mapping[str, Any]) -> None:
    """Write e2m1 values, of which each byte has two: the first in the low bits or, if `high_first` is set, in the high bits."""
    table = _e2m1_pairs(settings.get("high_first", False))
    pairs = table.index_select(0, codes.view(torch.uint8).reshape(-1).to(torch.int32))
    out.copy_(pairs.view(torch.float16).view(len(codes), -1)[:, : out.shape[1]])


def write_words(codes: torch.Tensor, out: torch.Tensor, settings: Mapping[str, Any]) -> None:
    """Write integers of `bits` bits in int32 words, the first in the lowest bits. Each is stored plus 2^(bits-1)."""
    bits, columns = settings["bits"], out.shape[1]
    if bits == 8:
        out.copy_(codes.view(torch.int8).bitwise_xor(-128)[:, :columns])
    elif bits == 4:
        pairs = codes.view(torch.uint8).to(torch.int16)
        nibbles = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.int8).sub_(8)
        out.copy_(nibbles[:, :columns])
    else:
        words, count = _groups(codes, bits) if settings["dense"] else (codes, 32 // bits)
        out.copy_(_split(words, bits, count)[:, :columns].sub_(1 << (bits - 1)))


def write_six_bits(codes: torch.Tensor, out: torch.Tensor, settings: Mapping[str, Any]) -> None:
    """Write floats of six bits, of which three bytes have four, the first in the lowest bits. `element`: their dtype's name."""
    found = _split(_groups(codes, 6)[0], 6, 4)
    out.copy_(_values_of(settings["element"]).index_select(0, found.flatten()).view(found.shape)[:, : out.shape[1]])


def write_row_pairs(codes: torch.Tensor, out: torch.Tensor, settings: Mapping[str, Any]) -> None:
    """Write int4 values in two's complement. A byte has one of row 2r, in its low bits, and one of row 2r + 1."""
    rows, signed = out.view(len(codes), 2, -1), codes.view(torch.int8)
    rows[:, 0] = (signed << 4) >> 4
    rows[:, 1] = signed >> 4


def write_row_words(codes: torch.Tensor, out: torch.Tensor, settings: Mapping[str, Any]) -> None:
    """Write integers of 4 bits. An int32 word has one of each of eight rows, whose places from the lowest bits on are `order`.
    `signed`: whether they are in two's complement.
    """
    rows = out.view(len(codes), 8, -1)
    for place, row in enumerate(settings["order"]):
        nibbles = (codes >> 4 * place).bitwise_and_(15)
        rows[:, row] = nibbles.bitwise_xor_(8).sub_(8) if settings["signed"] else nibbles


UNPACK: Mapping[str, Unpack] = {
    "plain": write_plain,
    "e2m1": write_e2m1,
    "words": write_words,
    "six bits": write_six_bits,
    "row pairs": write_row_pairs,
    "row words": write_row_words,
}
"""The function for each value of the setting `code`."""


def _groups(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
    """Join the bytes of codes that are packed without gaps: the fewest bytes with a whole number of codes to an integer.

    Returns (integers [rows, groups], number of codes in each). For example, 3 bytes have 8 codes of 3 bits or 4 of 6 bits.
    """
    count = 8 // math.gcd(bits, 8)
    width = bits * count // 8
    raw = codes.view(torch.uint8)
    if spare := raw.shape[1] % width:
        raw = torch.nn.functional.pad(raw, (0, width - spare))
    groups = raw.view(len(raw), -1, width).to(torch.int32 if width < 4 else torch.int64)
    joined = groups[:, :, 0]
    for place in range(1, width):
        joined = joined | groups[:, :, place] << 8 * place
    return joined, count


def _split(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return `count` unsigned integers of `bits` bits from each integer [rows, words], lowest bits first: [rows, count * words]."""
    shifts = torch.arange(count, dtype=words.dtype) * bits
    return ((words[:, :, None] >> shifts).bitwise_and_((1 << bits) - 1)).flatten(1)


def unpack_bits(words: torch.Tensor, indices: range, bits: int, dense: bool) -> torch.Tensor:
    """Return the unsigned integers with the given indices in each row of int32 words [rows, words]: int64 [rows, indices].

    dense: whether integers continue in the next word if a word has too few bits left. Otherwise these bits are unused.
    """
    index = torch.arange(indices.start, indices.stop)
    start = index * bits if dense else index // (32 // bits) * 32 + index % (32 // bits) * bits
    word = start // 32
    low = words.index_select(1, word).to(torch.int64) & 0xFFFFFFFF
    high = words.index_select(1, (word + 1).clamp_(max=words.shape[1] - 1)).to(torch.int64)
    return ((high << 32).bitwise_or_(low) >> (start % 32)) & ((1 << bits) - 1)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32. Bytes, uint8 or float8_e8m0fnu, are exponents of two plus 127, and 255 is NaN."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = scale.view(torch.uint8).to(torch.int32)
        # 2^-127 is a subnormal float32, whose bits are not an exponent alone.
        powers = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
        return powers.masked_fill_(exponents == 255, torch.nan)
    if scale.dtype == torch.float8_e4m3fn:
        out = torch.empty(scale.shape, dtype=torch.float32)
        _write_e4m3(scale, out)
        return out
    return scale.to(torch.float32)


def rows_of_tiles(scale: torch.Tensor, rows: range, blocks: int) -> torch.Tensor:
    """Return the scales [rows, blocks] of some rows from the order in which cuBLAS wants them: tiles of 128 rows by 4 blocks, in
    which the scale of row r and block c is at (r % 32) * 16 + (r // 32) * 4 + c. Tiles at the edges are padded.
    """
    across, top = -(-blocks // 4), rows.start // 128
    tiles = scale.reshape(-1, across, 32, 4, 4)[top : -(-rows.stop // 128)]
    found = tiles.permute(0, 3, 2, 1, 4).reshape(-1, across * 4)
    return found[rows.start - top * 128 : rows.stop - top * 128, :blocks]


def unrotate(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Multiply each group of `columns` columns of float32 values by ConvRot's Hadamard matrix, a Kronecker power of H = J / 2 - P,
    where J is a 4 x 4 matrix of ones, and P reverses four values. It is its own inverse.
    """
    shape, apart = values.shape, 1
    while apart < columns:
        quads = values.reshape(-1, 4, apart)
        values = quads.sum(1, keepdim=True).mul_(0.5) - quads.flip(1)
        apart *= 4
    return values.view(shape)
