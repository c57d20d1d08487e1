"""Decodes weights of 8 bits that optimum-quanto wrote."""

from __future__ import annotations

import math

import torch

from dtype_engine.checkpoint.schemes import CODES, EncodedWeight
from dtype_engine.runtime.formats.schemes.parts import Parts
from dtype_engine.runtime.formats.schemes.unpack import decode_rows, scale_groups, write_plain


def decode(weight: EncodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the channels from `first` up to `last` of a weight [out, in, ...] in float32. A value is its code times its channel's
    scale. parts: the weight's stored tensors, keyed by role.
    """
    scale = parts["scale"].view(-1, 1).to(torch.float32)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        write_plain(parts[CODES][start:stop].flatten(1), out)
        scale_groups(out, scale[start:stop])

    return decode_rows(first, last, math.prod(weight.shape[1:]), fill).view(-1, *weight.shape[1:])
