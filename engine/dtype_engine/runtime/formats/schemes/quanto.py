"""Decodes weights that optimum-quanto wrote."""

from __future__ import annotations

import math

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import decode_rows, scale_groups, write_plain


def _decode_bytes(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    scale = parts["scale"].view(-1, 1).to(torch.float32)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        write_plain(parts[CODES][start:stop].flatten(1), out)
        scale_groups(out, scale[start:stop])

    return decode_rows(first, last, math.prod(weight.shape[1:]), fill).view(-1, *weight.shape[1:])


def _decode_bits(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the rows from `first` up to `last` of packed codes. A value is code * scale - shift if shifts are floating-point
    numbers, and (code - shift) * scale if they are integers.
    """
    bits, codes = weight.settings["bits"], parts[CODES]
    scale, shift = (parts[role].reshape(weight.shape[0], -1) for role in ("scale", "shift"))
    each = scale.shape[1]

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        groups = torch.arange(start * each, stop * each)
        places = (groups // len(codes) * bits).to(torch.uint8)
        held = codes.index_select(0, groups % len(codes)) >> places[:, None]
        out.view(len(groups), -1).copy_(held.bitwise_and_((1 << bits) - 1))
        factors, less = scale[start:stop].to(torch.float32), shift[start:stop].to(torch.float32)
        if shift.is_floating_point():
            scale_groups(out, factors, offset=-less)
        else:
            scale_groups(out, factors, less)

    return decode_rows(first, last, weight.shape[1], fill)


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of a quanto weight from `first` up to `last` along its first dimension, in float32."""
    return (_decode_bits if "bits" in weight.settings else _decode_bytes)(weight, parts, first, last)
