"""Decodes float8 codes with a scale for each block, as DeepSeek publishes them."""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, EncodedWeight
from dtype_engine.runtime.formats.schemes.parts import Parts


def decode(weight: EncodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the rows from `first` up to `last` of a weight [out, in]: each code times the scale of its block, in float32."""
    rows, columns = weight.settings["block"]
    codes = parts[CODES][first:last].to(torch.float32)
    scale = parts["scale"].to(torch.float32)[torch.arange(first, last) // rows]
    return codes.mul_(scale.repeat_interleave(columns, 1)[:, : codes.shape[1]])
