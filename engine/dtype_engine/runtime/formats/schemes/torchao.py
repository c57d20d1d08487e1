"""Decodes torchao's tensors: int8, float8 or E2M1 codes with a scale, and perhaps a zero point, for each block."""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, EncodedWeight
from dtype_engine.runtime.formats.schemes.parts import Parts
from dtype_engine.runtime.formats.schemes.swizzled import unswizzle
from dtype_engine.runtime.formats.schemes.words import decode_rows, e2m1_pairs, look_up, scale_groups, write_values


def decode(weight: EncodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the rows from `first` up to `last` of a weight [out, in]: (code - zero point) times scale, in float32."""
    high, wide = weight.settings["block"]
    groups = weight.shape[1] // wide
    low, end = first // high, -(-last // high)  # the rows of blocks in which the rows lie
    scale = parts["scale"]
    scale = unswizzle(scale, groups, low, end) if weight.settings["swizzled"] else scale.view(-1, groups)[low:end]
    scale = scale.to(torch.float32)
    if "global_scale" in parts:
        scale = scale * parts["global_scale"].to(torch.float32)
    zero = parts["zero"].view(-1, groups)[low:end].to(torch.float32) if "zero" in parts else None

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        codes = parts[CODES][start:stop]
        if codes.dtype == torch.uint8:
            look_up(codes, e2m1_pairs(), out)
        else:
            write_values(codes, out)
        rows = torch.arange(start, stop) // high - low
        scale_groups(out, scale[rows], None if zero is None else zero[rows])

    return decode_rows(first, last, weight.shape[1], fill)
