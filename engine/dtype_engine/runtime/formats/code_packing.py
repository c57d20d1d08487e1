"""Elements of block formats: rounding to floats of few bits, and packing codes into bytes and words.

While a model runs, codes of floats are kept as float8_e4m3fn, which can represent all values of 4 and 6 bits.
"""

from __future__ import annotations

import torch

from dtype_engine.core.block_formats import Packing
from dtype_engine.core.dtypes import DType

_EXPONENT = 0x7F800000
_HALF_TO_EVEN = 1.5 * 2.0**23
"""This many steps, added to a float32, leave it no bits below the step, so that the addition rounds to a multiple of it, half to
even."""


def round_to_float(values: torch.Tensor, element: DType, spare: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Round float32 values, none of them beyond the largest element, to the nearest element, half to even; zero keeps its sign.

    spare: memory of the same shape, which is overwritten. The result is written to `out`, which is returned.
    """
    torch.bitwise_and(values.view(torch.int32), _EXPONENT, out=spare.view(torch.int32))
    spare.clamp_(min=element.tiny).mul_(2.0**-element.mantissa * _HALF_TO_EVEN)
    return torch.add(values, spare, out=out).sub_(spare).copysign_(values)


def pack(codes: torch.Tensor, element: DType, packing: Packing) -> torch.Tensor:
    """Codes [rows, width], float8_e4m3fn or int8, as a file has them: uint8 or int32 [rows, packed].

    The first code takes the lowest bits, and zeros fill the last byte or word. Codes that are not packed are returned as they are.
    """
    if packing == "none":
        return codes
    return pack_words(codes, element.bits) if packing == "words" else pack_nibbles(codes)


def unpack(packed: torch.Tensor, width: int, element: DType, packing: Packing) -> torch.Tensor:
    """The codes [rows, width] that `pack` packed."""
    if packing == "none":
        return packed
    return unpack_words(packed, width, element.bits) if packing == "words" else unpack_nibbles(packed, width)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack e2m1 values, kept as float8_e4m3fn [rows, width], two to a byte.

    As float8_e4m3fn, 0.5, 1, 1.5, ... 6 are the bytes 0x30, 0x38, 0x3c, ... 0x4c. From 1 on these are four apart where e2m1's codes
    2 to 7 are one apart.
    """
    rows, width = codes.shape
    bits = codes.view(torch.uint8)
    magnitude = bits & 0x7F
    found = torch.where(magnitude == 0, 0, ((magnitude >> 2).to(torch.int8) - 12).clamp_(min=1)).to(torch.uint8)
    nibbles = bits.new_zeros((rows, width + width % 2))
    nibbles[:, :width] = found | ((bits & 0x80) >> 4)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The e2m1 values [rows, width] that `pack_nibbles` packed."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=2).flatten(1)[:, :width]
    magnitude = nibbles & 7
    bits = torch.where(magnitude >= 2, (magnitude + 12) << 2, magnitude * 0x30) | ((nibbles & 8) << 4)
    return bits.to(torch.uint8).view(torch.float8_e4m3fn)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 codes [rows, width] of `bits` bits each, offset so that the smallest code is 0, into int32 [rows, words]."""
    per_word = 32 // bits
    rows, width = codes.shape
    unsigned = codes.new_zeros((rows, -(-width // per_word) * per_word), dtype=torch.int32)
    unsigned[:, :width] = codes.to(torch.int32) + (1 << (bits - 1))
    shifts = torch.arange(per_word, dtype=torch.int32, device=codes.device) * bits
    return (unsigned.reshape(rows, unsigned.shape[1] // per_word, per_word) << shifts).sum(dim=2, dtype=torch.int32)


def unpack_words(packed: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """The int8 codes [rows, width] that `pack_words` packed."""
    shifts = torch.arange(32 // bits, dtype=torch.int32, device=packed.device) * bits
    unsigned = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return (unsigned.flatten(1)[:, :width] - (1 << (bits - 1))).to(torch.int8)
