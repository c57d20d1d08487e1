"""fp8 in blocks of 128 x 128, as in DeepSeek-V3: e4m3 elements and one scale for each block.

The scale is amax / 448 in float32, where amax is the largest |value| of the block, or float32's epsilon for a block of zeros, as in
compressed-tensors. With `ue8m0`, the scale is amax / 448 rounded up to a power of two and stored as a byte, or 1 for a block of
zeros, as in transformers. Scales are limited so that 448 times the scale is finite in float32.
"""

from __future__ import annotations

import torch

from dtype_engine.core.dtypes import DType
from dtype_engine.runtime.formats import mx
from dtype_engine.runtime.formats.scales import Scales, largest_scale

_EPSILON = torch.finfo(torch.float32).eps
_ONE = 127
"""The byte that stores the power-of-two scale 2^0 = 1."""


def scales(amax: torch.Tensor, element: DType) -> Scales:
    """Return the scales of blocks whose largest |value| is `amax` (float32, finite): float32, or uint8 in the format `ue8m0`."""
    if element.blocks is not None and element.blocks.rule == "rceil":
        powers = mx.scales(amax, element, "rceil")
        zero = amax == 0
        return Scales(
            torch.where(zero, 1.0, powers.effective),
            torch.where(zero, torch.full_like(powers.stored, _ONE), powers.stored),
        )
    plain = (amax / element.max).clamp_(max=largest_scale(element.max))
    plain = torch.where(plain == 0, _EPSILON, plain)
    return Scales(plain, plain)
