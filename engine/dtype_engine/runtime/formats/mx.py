"""Scales of MXFP8, MXFP6 and MXFP4: a power of two for each block of 32 elements, stored as one byte (E8M0: the exponent plus 127).

The formula is from OCP Microscaling Formats 1.0, section 5: the exponent of a block's scale is the exponent of the block's largest
|value| minus that of the element type's largest value (8 for e4m3, 2 for e2m1 and e2m3, 4 for e3m2). This exponent is increased by
one if the mantissa m of the block's largest |value|, 1 <= m < 2, is beyond a limit that depends on the scale rule:

- `floor`: never; values beyond the largest element are clamped (the OCP text, 6.3; llama.cpp, microxcaling);
- `rceil`: m is larger than the mantissa of the largest element, so nothing is clamped (ModelOpt, cuBLAS);
- `even`: m rounds up to 2 in the element's own mantissa, half to even (Quark, torchao's EVEN; MXFP6 of compressed-tensors);
- `compressed-tensors`: m >= 1.75, for e2m1 and e4m3 alike (what llm-compressor writes and vLLM loads).

A block of zeros has the byte 0. Exponents are limited so that the largest element times the scale is finite in float32. Values
beyond that product saturate, while in other programs they become infinite.
"""

from __future__ import annotations

import math

import torch

from dtype_engine.core.block_formats import ScaleRule
from dtype_engine.core.dtypes import DType
from dtype_engine.runtime.formats.scales import Scales

_MANTISSA = 23
"""The number of bits of float32's mantissa."""
_LARGEST = 254
"""The byte that stores the largest scale, 2^127, which is float32's largest power of two. 255 is NaN."""


def scales(amax: torch.Tensor, element: DType, rule: ScaleRule) -> Scales:
    """Return the scales of blocks whose largest |value| is `amax` (float32, finite), chosen by `rule`. They are stored in uint8."""
    highest = _exponent(element)
    bits = amax.contiguous().view(torch.int32) + _carry(element, rule)
    exponents = (bits >> _MANTISSA).sub_(highest).clamp_(0, _LARGEST - highest)
    # 2^-127 is a subnormal float32, whose bits are not an exponent alone.
    powers = torch.where(exponents == 0, 1 << (_MANTISSA - 1), exponents << _MANTISSA).view(torch.float32)
    return Scales(powers, exponents.to(torch.uint8))


def largest(element: DType) -> float:
    """Return the largest |value| that a weight in an MX format can have: the largest element times the largest scale."""
    return math.ldexp(element.max, _LARGEST - 127 - _exponent(element))


def _exponent(element: DType) -> int:
    return math.frexp(element.max)[1] - 1


def _carry(element: DType, rule: ScaleRule) -> int:
    """Return an integer to add to the float32 bits of a block's largest |value|, so that the exponent increases by one exactly
    where the rule requires it.
    """
    if rule == "floor":
        return 0
    if rule == "rceil":
        largest = math.frexp(element.max)[0] * 2 - 1
        return (1 << _MANTISSA) - 1 - int(largest * (1 << _MANTISSA))
    return 1 << (_MANTISSA - 1 - (1 if rule == "compressed-tensors" else element.mantissa))
