"""Scales of fp8 weights with a scale for each block of 128 x 128 e4m3 elements, as in DeepSeek-V3.

In the format with float32 scales, the scale is amax / 448, where amax is the largest |value| of the block. A block of zeros has
float32's epsilon as its scale, as in compressed-tensors. In the format `ue8m0`, amax / 448 is rounded up to a power of two and
stored as a byte. A block of zeros has the scale 1 there, as in transformers. Scales are limited so that 448 times the scale is
finite in float32.
"""

from __future__ import annotations

import torch

from dtype_engine.core.dtypes import DType
from dtype_engine.runtime.device import divide
from dtype_engine.runtime.formats import mx
from dtype_engine.runtime.formats.scales import Scales, largest_scale

_EPSILON = torch.finfo(torch.float32).eps
_ONE = 127
"""The byte that stores the power-of-two scale 2^0 = 1."""


def scales(amax: torch.Tensor, element: DType) -> Scales:
    """Return the scales of blocks whose largest |value| is `amax` (float32, finite). Those of `ue8m0` are stored in uint8."""
    if element.blocks is not None and element.blocks.rule == "rceil":
        powers = mx.scales(amax, element, "rceil")
        zero = amax == 0
        return Scales(
            torch.where(zero, 1.0, powers.effective),
            torch.where(zero, torch.full_like(powers.stored, _ONE), powers.stored),
        )
    plain = divide(amax, element.max).clamp_(max=largest_scale(element.max))
    plain = torch.where(plain == 0, _EPSILON, plain)
    return Scales(plain, plain)
