"""Defines `Scales`, the scales of a weight's blocks, and the upper limit for a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a weight's blocks. Each tensor is [blocks down, blocks across]."""

    effective: torch.Tensor
    """The factor by which codes are multiplied to get values, float32."""
    stored: torch.Tensor
    """The scales as a file stores them, in the format's scale dtype."""
    zero: torch.Tensor | None = None
    """The code that represents 0 in each block, int8, or None for a format without zero points."""


@cache
def largest_scale(code: float) -> float:
    """Return the largest float32 scale whose product with `code`, the largest code of a format, is finite in float32."""
    scale = torch.tensor(FLOAT32_MAX / code, dtype=torch.float32)
    while math.isinf(float(scale * code)):
        scale = torch.nextafter(scale, torch.tensor(0.0))
    return float(scale)
