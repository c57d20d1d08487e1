"""Rounds values to floats of 4, 6 or 8 bits, and packs their codes into bytes and words. Before packing, codes of 4 and 6 bits are
held as float8_e4m3fn, which can represent all their values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtype_engine.core.block_formats import Packing
from dtype_engine.core.dtypes import DType
from dtype_engine.runtime.device import copied_to

_EXPONENT = 0x7F800000
_POSITIVE = (0, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C)
"""The bytes of float8_e4m3fn for 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""
_E2M1 = tuple(sign | code for sign in (0, 0x80) for code in _POSITIVE)
"""The byte of float8_e4m3fn for each code of e2m1, the negative ones last."""


def _pairs(codes: Sequence[int]) -> torch.Tensor:
    """Return a table that unpacks each byte of two 4-bit codes to two bytes, the lower code first: int16 [256]. codes: the
    unpacked byte for each of the 16 codes.
    """
    pairs = [[codes[byte & 15], codes[byte >> 4]] for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.uint8).view(torch.int16).flatten()


_E2M1_PAIRS = _pairs(_E2M1)
_SIGNED_PAIRS = _pairs([(code - 8) & 0xFF for code in range(16)])
"""The table of `_pairs` for int8 values that are stored as codes of four bits without a sign: code 8 is zero."""
_HALF_TO_EVEN = 1.5 * 2.0**23
"""If this number times a power of two p is added to a float32 value and subtracted again, the value is rounded to a multiple of p,
half to even: the sum is so large that float32 has no bits below p for it.
"""


def round_to_float(values: torch.Tensor, element: DType, spare: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Round float32 values to the nearest value of an element type, half to even, in `out`. Zero keeps its sign. No |value| may
    exceed the type's largest value. spare: memory of the same shape, which is overwritten.
    """
    torch.bitwise_and(values.view(torch.int32), _EXPONENT, out=spare.view(torch.int32))
    spare.clamp_(min=element.tiny).mul_(2.0**-element.mantissa * _HALF_TO_EVEN)
    return torch.add(values, spare, out=out).sub_(spare).copysign_(values)


def pack(codes: torch.Tensor, element: DType, packing: Packing) -> torch.Tensor:
    """Pack codes [rows, width], float8_e4m3fn or int8, as a file stores them: uint8 or int32 [rows, packed], filled from the lowest
    bits on, with zeros at the end. The packing "none" changes nothing.
    """
    if packing == "none":
        return codes
    return pack_words(codes, element.bits) if packing == "words" else pack_nibbles(codes)


def unpack(packed: torch.Tensor, width: int, element: DType, packing: Packing) -> torch.Tensor:
    """Return the codes that `pack` has packed with the same `packing`: [rows, width], float8_e4m3fn or int8."""
    if packing == "none":
        return packed
    return unpack_words(packed, width, element.bits) if packing == "words" else unpack_nibbles(packed, width)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack e2m1 values, given as float8_e4m3fn [rows, width], two to a byte: uint8 [rows, bytes].

    The float8_e4m3fn bytes of the e2m1 values 0.5, 1, 1.5, ... 6 are 0x30, 0x38, 0x3c, ... 0x4c. From 1 on, neighboring bytes
    differ by 4, while the e2m1 codes of these values, 2 to 7, differ by 1.
    """
    rows, width = codes.shape
    bits = codes.view(torch.uint8)
    magnitude = bits & 0x7F
    found = torch.where(magnitude == 0, 0, ((magnitude >> 2).to(torch.int8) - 12).clamp_(min=1)).to(torch.uint8)
    nibbles = bits.new_zeros((rows, width + width % 2))
    nibbles[:, :width] = found | ((bits & 0x80) >> 4)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return the e2m1 values that `pack_nibbles` has packed, as float8_e4m3fn [rows, width]."""
    return _unpack_pairs(packed, _E2M1_PAIRS)[:, :width].view(torch.float8_e4m3fn)


def _unpack_pairs(packed: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return both codes of each byte of `packed`, uint8 [rows, 2 * bytes]. pairs: a table made by `_pairs`."""
    found = copied_to(pairs, packed.device).index_select(0, packed.reshape(-1).to(torch.int32))
    return found.view(torch.uint8).view(len(packed), 2 * packed.shape[1])


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 codes [rows, width] of `bits` bits into int32 [rows, words], after adding 2^(bits-1) to make them nonnegative."""
    per_word = 32 // bits
    rows, width = codes.shape
    unsigned = codes.new_zeros((rows, -(-width // per_word) * per_word), dtype=torch.int32)
    unsigned[:, :width] = codes.to(torch.int32) + (1 << (bits - 1))
    shifts = torch.arange(per_word, dtype=torch.int32, device=codes.device) * bits
    return (unsigned.reshape(rows, unsigned.shape[1] // per_word, per_word) << shifts).sum(dim=2, dtype=torch.int32)


def unpack_words(packed: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """Return the int8 codes [rows, width] of `bits` bits each that `pack_words` has packed."""
    if bits == 4:  # the bytes of a word follow each other from its lowest bits on
        return _unpack_pairs(packed.contiguous().view(torch.uint8), _SIGNED_PAIRS)[:, :width].view(torch.int8)
    shifts = torch.arange(32 // bits, dtype=torch.int32, device=packed.device) * bits
    unsigned = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return (unsigned.flatten(1)[:, :width] - (1 << (bits - 1))).to(torch.int8)
