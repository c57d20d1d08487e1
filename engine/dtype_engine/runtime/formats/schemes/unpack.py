"""Unpacks codes to float32 values. A weight is decoded every time it is used, and allocating memory takes longer than the
arithmetic. So the result is allocated once, and codes are unpacked into it some rows at a time, few enough for the processor's
cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache

import torch

from dtype_engine.core import dtypes
from dtype_engine.runtime.device import copied_to
from dtype_engine.runtime.formats.row_blocks import CHUNK, parallel_map

_ALIGNED = 32
"""Rows are decoded in multiples of this, so that a call of `Fill` gets all rows whose codes share a word."""
_POWERS = torch.tensor([*(math.ldexp(1, code - 127) for code in range(255)), math.nan], dtype=torch.float32)
"""The scale 2^(b - 127) for each byte b that stores an exponent; NaN for 255."""
_UE5M3 = torch.tensor(
    [*(math.ldexp(code % 8 + 8 * (code > 7), max(code // 8, 1) - 18) for code in range(255)), math.nan],
    dtype=torch.float32,
)
"""The scale for each byte with an exponent of 5 bits, whose bias is 15, a mantissa of 3 bits and no sign; NaN for 255. See
AutoRound, `data_type/nvfp.py`, `e5m3_to_float_tensor`.
"""
Fill = Callable[[torch.Tensor, int, int], None]
"""`fill(out, start, stop)` writes the rows from `start` up to `stop` to `out`, float32 [stop - start, columns], contiguous and not
initialized. Several threads call it at the same time.
"""


def decode_rows(first: int, last: int, columns: int, fill: Fill) -> torch.Tensor:
    """Return the rows from `first` up to `last` of a weight: float32 [last - first, columns]. fill: decodes some of them."""
    with torch.inference_mode(False):  # else the other threads, which have no inference mode, can't write
        out = torch.empty(last - first, columns, dtype=torch.float32)
    step = max(CHUNK // max(columns, 1) // _ALIGNED, 1) * _ALIGNED
    starts = range(first, last, step)

    def work(pieces: Iterable[int]) -> None:
        for start in (starts[piece] for piece in pieces):
            stop = min(start + step, last)
            fill(out[start - first : stop - first], start, stop)

    parallel_map(work, len(starts))
    return out


def unpack(packed: torch.Tensor, bits: int, out: torch.Tensor, dense: bool = True) -> None:
    """Unpack the codes in every row of `packed`, and write them to `out` as float32. A code has `bits` bits, 1 to 8; the first is
    in the lowest bits.

    packed: [rows, bytes or words] of any integer dtype. out: [rows, codes], contiguous. Codes beyond its last column are skipped.
    dense: whether a code may begin in one byte or word and end in the next. If not, `packed` is int32, and the highest bits of a
    word are unused if they are too few for a code.
    """
    if packed.stride(-1) != 1:
        packed = packed.clone(memory_format=torch.contiguous_format)
    columns, raw = out.shape[1], packed.view(torch.uint8)
    if bits == 8:
        out.copy_(raw[:, :columns])
        return
    if bits == 4:
        nibbles = raw.to(torch.int16)
        nibbles = (nibbles << 4).bitwise_or_(nibbles).bitwise_and_(0x0F0F)
        out.copy_(nibbles.view(torch.uint8)[:, :columns])
        return
    together = 8 // math.gcd(8, bits) if dense else 32 // bits  # the fewest codes that fill bytes, or a word's codes
    count = -(-columns // together)
    whole = out if count * together == columns else out.new_empty(len(out), count * together)
    codes = whole.view(len(out), count, together)
    if dense:
        width = together * bits // 8
        missing = max(0, count * width - raw.shape[1])
        words = torch.nn.functional.pad(raw, (0, missing))[:, : count * width].view(len(out), count, width)
    else:
        words = packed[:, :count, None]
    for index in range(together):
        word, shift = divmod(index * bits, 8) if dense else (0, index * bits)
        code = words[..., word] >> shift
        if dense and shift + bits > 8:
            code.bitwise_or_(words[..., word + 1] << (8 - shift))
        codes[..., index] = code.bitwise_and_((1 << bits) - 1)
    if whole is not out:
        out.copy_(whole[:, :columns])


def look_up(codes: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Write the entry of `table` for each byte of `codes` to `out`. table: float32 [256] or, for pairs of codes, [256, 2]. All
    tensors are contiguous.
    """
    entries = table if table.dim() == 1 else table.view(torch.int64).view(-1)  # two float32 are copied as one int64
    index = codes.view(torch.uint8).reshape(-1).to(torch.int32)
    torch.index_select(entries, 0, index, out=out.view(entries.dtype).view(-1))


def pairs(values: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """Return a table for `look_up` of bytes with two 4-bit codes: float32 [256, 2]. values: the values of the 16 codes. high_first:
    whether a byte's high bits hold the first code.
    """
    table = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)
    return table.flip(1).contiguous() if high_first else table


@cache
def float_values(element: str) -> torch.Tensor:
    """Return the values of all codes of a float dtype of 4 or 6 bits without NaN, such as "mxfp6_e2m3": float32 [codes]."""
    row = dtypes.BY_NAME[element]
    return minifloat_values(row.exponent, row.mantissa)


@cache
def minifloat_values(exponent_bits: int, mantissa_bits: int) -> torch.Tensor:
    """Return the values of all codes of a float with a sign and without infinity and NaN: float32 [codes]."""
    bits, bias = 1 + exponent_bits + mantissa_bits, (1 << (exponent_bits - 1)) - 1
    codes = torch.arange(1 << bits)
    mantissa = (codes & ((1 << mantissa_bits) - 1)).to(torch.float32) / (1 << mantissa_bits)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    magnitude = torch.ldexp(torch.where(exponent == 0, mantissa, 1 + mantissa), exponent.clamp(1) - bias)
    return torch.where(codes >> (bits - 1) == 1, -magnitude, magnitude)


@cache
def e2m1_pairs(high_first: bool = False) -> torch.Tensor:
    """Return the table that `pairs` makes for the values of e2m1."""
    return pairs(float_values("nvfp4"), high_first)


@cache
def int4_pairs() -> torch.Tensor:
    """Return the table that `pairs` makes for integers of 4 bits in two's complement."""
    return pairs(torch.arange(16).bitwise_xor(8).sub(8).to(torch.float32))


def write_plain(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Convert int8 or float8 codes to float32 and write them to `out`, of the same shape. The common float8 dtypes are converted by
    bit operations, because torch's own conversion takes five times as long.
    """
    if codes.dtype == torch.float8_e4m3fn:
        # The bits are moved to the sign, exponent and mantissa of a float16. Its value is 1/256 of the float8's, also for
        # subnormal values. Only NaN would become 480, so it is set afterwards.
        raw = codes.view(torch.uint8)
        bits = raw.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.copy_(bits.view(torch.float16)).mul_(256)
        magnitudes = raw & 0x7F
        if raw.numel() and int(magnitudes.amax()) == 0x7F:
            out.masked_fill_(magnitudes == 0x7F, torch.nan)
    elif codes.dtype == torch.float8_e5m2:  # the upper byte of a float16
        out.copy_(codes.view(torch.uint8).to(torch.int16).bitwise_left_shift_(8).view(torch.float16))
    else:
        out.copy_(codes)


def scale_values(scale: torch.Tensor, code: str = "e8m0") -> torch.Tensor:
    """Convert scales of any dtype to float32. In uint8 and float8_e8m0fnu, a byte b means 2^(b - 127), and 255 means NaN. int64
    holds the bits of float32. code: "ue5m3" if bytes are floats instead.
    """
    if scale.dtype == torch.int64:
        return scale.to(torch.int32).view(torch.float32)
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        table, codes = _UE5M3 if code == "ue5m3" else _POWERS, scale.view(torch.uint8).reshape(-1).to(torch.int32)
        return copied_to(table, scale.device).index_select(0, codes).view(scale.shape)
    out = torch.empty(scale.shape, dtype=torch.float32, device=scale.device)
    write_plain(scale, out)
    return out


def unrotate(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Multiply each group of `columns` columns by a Hadamard matrix, which is its own inverse. `columns` is a power of two. For a
    power of four, the matrix is a Kronecker power of H = J / 2 - P, where J is a 4 x 4 matrix of ones, and P reverses the order of
    four values (ConvRot). Otherwise it is one of [[1, 1], [1, -1]] / sqrt(2), as in SDNQ.
    """
    shape, apart = values.shape, 1
    if columns.bit_length() % 2:
        while apart < columns:
            quads = values.reshape(-1, 4, apart)
            values = quads.sum(1, keepdim=True).mul_(0.5) - quads.flip(1)
            apart *= 4
        return values.view(shape)
    while apart < columns:
        upper, lower = values.reshape(-1, 2, apart).unbind(1)
        values = torch.stack((upper + lower, upper - lower), 1)
        apart *= 2
    return values.view(shape).mul_(columns**-0.5)


def scale_groups(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, offset: torch.Tensor | None = None
) -> None:
    """Subtract each group's zero point from its values, multiply them by its scale, and add its offset, in place. values: float32
    [rows, columns], contiguous. scale, zero, offset: float32 [rows or 1, groups]. All groups have the same number of columns.
    """
    grouped = values.view(len(values), scale.shape[1], -1)
    if zero is not None:
        grouped.sub_(zero[..., None])
    grouped.mul_(scale[..., None])
    if offset is not None:
        grouped.add_(offset[..., None])
