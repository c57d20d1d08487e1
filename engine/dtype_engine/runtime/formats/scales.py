"""What every family gives: the scales of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of some blocks, [down, across].

    effective: what the values of codes are multiplied by, float32. stored: as a file has them, in their own dtype. zero: the
    integer that stands for 0 in each block, int8, where the format has one.
    """

    effective: torch.Tensor
    stored: torch.Tensor
    zero: torch.Tensor | None = None
