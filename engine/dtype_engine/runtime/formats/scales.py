"""The scales of blocks, which each family of formats computes in its own way, and the largest scale that any may have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of some blocks; each tensor is [down, across]."""

    effective: torch.Tensor
    """The factor by which the values of codes are multiplied, float32."""
    stored: torch.Tensor
    """The scales as a file has them, in the dtype of the format."""
    zero: torch.Tensor | None = None
    """The code that means 0 in each block, int8; None for a format without zero points."""


@cache
def largest_scale(code: float) -> float:
    """The largest float32 whose product with `code`, the largest code of a format, is finite in float32."""
    scale = torch.tensor(FLOAT32_MAX / code, dtype=torch.float32)
    while math.isinf(float(scale * code)):
        scale = torch.nextafter(scale, torch.tensor(0.0))
    return float(scale)
