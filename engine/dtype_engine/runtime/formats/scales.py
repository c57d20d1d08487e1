"""Defines `Scales`, the scales of a weight's blocks, and the upper limit for a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from dtype_engine.runtime.device import divide

FLOAT32_MAX = torch.finfo(torch.float32).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a weight's blocks. Each tensor is [blocks down, blocks across]."""

    effective: torch.Tensor
    """The factor by which codes are multiplied to get values, float32."""
    stored: torch.Tensor
    """The scales as a file stores them, in the format's scale dtype."""
    zero: torch.Tensor | None = None
    """The code that represents 0 in each block, int8, or None for a format without zero points."""

    def rows(self, taken: slice) -> Scales:
        """Return the scales of some rows of blocks."""
        return Scales(self.effective[taken], self.stored[taken], None if self.zero is None else self.zero[taken])


@cache
def largest_scale(code: float) -> float:
    """Return the largest float32 scale whose product with `code`, the largest code of a format, is finite in float32."""
    scale = torch.tensor(FLOAT32_MAX / code, dtype=torch.float32)
    while math.isinf(float(scale * code)):
        scale = torch.nextafter(scale, torch.tensor(0.0))
    return float(scale)


def amax_to_scale(amax: torch.Tensor, top: float) -> torch.Tensor:
    """Return the scales amax / top, or 1 where amax is 0. top: the largest code. A scale is at least float32's smallest normal
    value, and limited so that top times the scale is finite.
    """
    return torch.where(amax > 0, divide(amax, top).clamp_(_SMALLEST_SCALE, largest_scale(top)), torch.ones_like(amax))
