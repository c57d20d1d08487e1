"""Decodes torchao's `Int4Tensor`, and by `block_scaled` torchao's other kinds of tensors."""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts, block_scaled
from dtype_engine.runtime.formats.schemes.unpack import decode_rows, look_up, pairs, scale_groups

_SIGNED = pairs(torch.arange(16, dtype=torch.float32).add_(8).remainder_(16).sub_(8))


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of a torchao weight from `first` up to `last` along its first dimension. If the weight has offsets, which
    are added to the values, a byte holds two codes in two's complement, the first in low bits.
    """
    if "offset" not in parts:
        return block_scaled.decode(weight, parts, first, last)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        look_up(parts[CODES][start:stop], _SIGNED, out)
        scale, offset = (parts[role][:, start:stop].t().to(torch.float32) for role in ("scale", "offset"))
        scale_groups(out, scale, offset=offset)

    return decode_rows(first, last, weight.shape[1], fill)
