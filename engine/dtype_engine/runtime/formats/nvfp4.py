"""Scales of NVFP4: e2m1 elements, an e4m3 scale for each block of 16, and one float32 scale for the tensor.

The arithmetic is that of compressed-tensors. The scale of the tensor is g = 1 / amax(tensor) * (448 * 6). The scale of a block is s
= e4m3(amax(block) / 6 * g), or 0.125 if that is zero. The code of a value w is e2m1(w / (s / g)), and its value is the code times s
/ g. The scale g has a lower limit, so that the largest dequantized value is finite in float32.
"""

from __future__ import annotations

import torch

from dtype_engine.core import dtypes
from dtype_engine.runtime.device import divide
from dtype_engine.runtime.formats.scales import FLOAT32_MAX, Scales

_ELEMENT = dtypes.BY_NAME["nvfp4"].max
_SCALE = dtypes.BY_NAME["float8_e4m3fn"].max
LARGEST = _SCALE * _ELEMENT
"""The largest element times the largest scale of a block, without the scale of the tensor."""
_FOR_ZERO = 0.125
_LEAST = LARGEST / FLOAT32_MAX * (1 + 2**-22)
"""The lower limit for the scale of a tensor, at which the largest dequantized value, 448 * 6 / scale, is just below float32's
largest. The factor 1 + 2^-22 keeps rounding in the divisions from making it infinite.
"""


def tensor_scale(amax: torch.Tensor) -> torch.Tensor:
    """Return the scale (float32, 0-d) of a tensor whose largest |value| is `amax`: 448 * 6 / amax, or 1 if that is infinite."""
    scale = amax.to(torch.float32).clamp(min=torch.finfo(torch.float32).tiny).reciprocal() * LARGEST
    return torch.where(torch.isfinite(scale), scale.clamp(min=_LEAST), 1.0)


def scales(amax: torch.Tensor, of_tensor: torch.Tensor) -> Scales:
    """Return the scales (float8_e4m3fn) of blocks whose largest |value| is `amax` (float32). of_tensor: the scale of the tensor."""
    wide = (divide(amax, _ELEMENT) * of_tensor).clamp_(max=_SCALE).to(torch.float8_e4m3fn).to(torch.float32)
    wide = torch.where(wide == 0, _FOR_ZERO, wide)
    return Scales(wide / of_tensor, wide.to(torch.float8_e4m3fn))
