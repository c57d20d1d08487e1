"""Turns codes of a few bits into float32 values in memory that is allocated once.

A weight is decoded whenever it is used. Fresh memory takes longer than the arithmetic, so codes are unpacked into the result in
pieces of some rows, whose intermediate results stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd

import torch

from dtype_engine.runtime.formats.row_blocks import CHUNK, parallel_map

_ALIGNED = 32
"""A piece starts at a multiple of this number of rows after the first row, so that it starts at a whole word if codes are packed
along the rows.
"""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the codes of FP4 in the OCP Microscaling specification 1.0: sign, two bits of exponent, one of mantissa."""


def decode_rows(first: int, last: int, columns: int, fill: Callable[[torch.Tensor, int, int], None]) -> torch.Tensor:
    """Return float32 [last - first, columns]. `fill(out, start, stop)` writes the rows from `start` up to `stop` to `out`, float32
    [stop - start, columns], which is contiguous and holds no values yet. It is called in several threads.
    """
    with torch.inference_mode(False):  # the other threads are in no inference mode, and may not write to its tensors
        out = torch.empty(last - first, columns)
    step = max(CHUNK // max(columns, 1) // _ALIGNED, 1) * _ALIGNED
    starts = range(first, last, step)

    def work(pieces: range) -> None:
        for start in (starts[piece] for piece in pieces):
            stop = min(start + step, last)
            fill(out[start - first : stop - first], start, stop)

    parallel_map(work, len(starts))
    return out


def unpack(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Write the codes of `bits` bits each, 1 to 8, in every row of `packed` as float32 to `out`. The lowest bits come first,
    without gaps, so a code may begin in one byte or word and end in the next.

    packed: [rows, bytes or words] of any integer dtype, contiguous. out: float32 [rows, codes], contiguous.
    """
    together = 8 // gcd(8, bits)  # the fewest codes that take whole bytes
    packed = packed.view(torch.uint8).view(len(out), -1, together * bits // 8)
    codes = out.view(len(out), -1, together)
    for index in range(together):
        byte, shift = divmod(index * bits, 8)
        code = packed[..., byte] >> shift
        if shift + bits > 8:
            code.bitwise_or_(packed[..., byte + 1] << (8 - shift))
        codes[..., index] = code.bitwise_and_((1 << bits) - 1)


def look_up(codes: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Write the entry of a table for each byte of `codes` to `out`, float32, contiguous. codes: contiguous, of any dtype. table:
    float32 [256], or [256, 2] for bytes that hold two codes each.
    """
    entries = table if table.dim() == 1 else table.view(torch.int64).view(-1)  # two values are copied as one number
    index = codes.view(torch.uint8).reshape(-1).to(torch.int32)
    torch.index_select(entries, 0, index, out=out.view(entries.dtype).view(-1))


def pairs(values: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """Return the table for `look_up` of bytes that hold two codes each, float32 [256, 2]. values: the values of the 16 codes,
    float32. high_first: the first code is in the high nibble of a byte.
    """
    table = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)
    return table.flip(1).contiguous() if high_first else table


@cache
def e2m1_pairs() -> torch.Tensor:
    """Return the table for `look_up` of bytes that hold two E2M1 codes, the first in the low nibble."""
    return pairs(torch.tensor(E2M1))


@cache
def float8_values(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of the 256 codes of a float8 dtype. A look-up is faster than torch's conversion."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def write_values(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Write codes that are numbers of their dtype, int8 or a float8 dtype, as float32 to `out` of the same number of elements. Both
    are contiguous.
    """
    if codes.dtype.is_floating_point:
        look_up(codes, float8_values(codes.dtype), out)
    else:
        out.copy_(codes.view(out.shape))


def scale_groups(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> None:
    """Subtract each group's zero point from its values, and multiply them by its scale, in place. values: float32 [rows, columns],
    contiguous. scale, zero: float32 [rows or 1, groups]; each group has the same number of columns.
    """
    grouped = values.view(len(values), scale.shape[1], -1)
    if zero is not None:
        grouped.sub_(zero[..., None])
    grouped.mul_(scale[..., None])
