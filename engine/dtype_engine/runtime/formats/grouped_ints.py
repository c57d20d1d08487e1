"""Scales of int4 and int8 weights with a scale for each group of successive values in a row. The arithmetic is that of
compressed-tensors.

Symmetric: scale = amax / 7.5 (amax / 127.5 for 8 bits), codes from -8 to 7 (-128 to 127). With zero points: scale = (max - min) /
15, where max and min include 0, and the code z = round(-8 - min / scale) represents 0. Arithmetic is in float32. Scales are stored
in bfloat16, so that loading a model in bfloat16 leaves them exact. A scale that would be zero is set to bfloat16's epsilon. A code
whose product with the scale would be infinite in float32 is not used: see `code_limit`.
"""

from __future__ import annotations

import torch

from dtype_engine.core.dtypes import DType
from dtype_engine.runtime.device import divide
from dtype_engine.runtime.formats.scales import FLOAT32_MAX, Scales

_EPSILON = torch.finfo(torch.bfloat16).eps


def code_range(element: DType) -> tuple[int, int]:
    """Return the smallest and the largest code of an integer format, such as -8 and 7 for int4."""
    return -(1 << (element.bits - 1)), (1 << (element.bits - 1)) - 1


def code_limit(scales: Scales, element: DType) -> torch.Tensor | None:
    """Return each group's largest |code - zero point| whose product with the scale is finite, or None if all products are."""
    least, most = code_range(element)
    reach = most - least if scales.zero is not None else -least
    limit = torch.floor(FLOAT32_MAX / scales.effective)
    return limit if bool((limit < reach).any()) else None


def symmetric(amax: torch.Tensor, element: DType) -> Scales:
    """Return the scales of groups whose largest |value| is `amax` (float32, finite)."""
    return _rounded(divide(amax, ((1 << element.bits) - 1) / 2))


def asymmetric(low: torch.Tensor, high: torch.Tensor, element: DType) -> Scales:
    """Return the scales and zero points of groups whose values lie between `low` <= 0 and `high` >= 0 (float32, finite)."""
    least, most = code_range(element)
    span = high - low
    steps = most - least
    wide = torch.where(torch.isfinite(span), divide(span, steps), divide(high, steps) - divide(low, steps))
    zero = (least - low / wide).nan_to_num_(0.0).clamp_(least, most).round_()
    return _rounded(wide, zero.to(torch.int8))


def _rounded(wide: torch.Tensor, zero: torch.Tensor | None = None) -> Scales:
    stored = wide.to(torch.bfloat16)
    stored = torch.where(stored == 0, torch.full_like(stored, _EPSILON), stored)
    return Scales(stored.to(torch.float32), stored, zero)
