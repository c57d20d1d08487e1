"""The scales of blocks, which each family of formats computes in its own way, and the largest scale that any may have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of some blocks, [down, across].

    effective: what the values of codes are multiplied by, float32. stored: as a file has them, in their own dtype. zero: the
    integer that stands for 0 in each block, int8, where the format has one.
    """

    effective: torch.Tensor
    stored: torch.Tensor
    zero: torch.Tensor | None = None


@cache
def largest_scale(code: float) -> float:
    """The largest float32 whose product with `code`, the largest code of a format, is finite in float32."""
    scale = torch.tensor(FLOAT32_MAX / code, dtype=torch.float32)
    while math.isinf(float(scale * code)):
        scale = torch.nextafter(scale, torch.tensor(0.0))
    return float(scale)
