"""Decodes MLX: integers with a scale and a bias for each group, or floats of four or eight bits with a scale for each group."""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import (
    decode_rows,
    e2m1_pairs,
    look_up,
    scale_groups,
    scale_values,
    unpack,
    write_plain,
)

_LARGEST_NVFP4 = 448.0 * 6.0
"""The largest e2m1 value times the largest e4m3 scale, by which MLX multiplies a tensor's `global_scale`."""


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of an MLX weight from `first` up to `last` along its first dimension. A value is code * scale + bias with
    integer codes in "affine" mode, and code * scale with float codes in other modes.
    """
    mode, bits, columns = weight.settings["mode"], weight.settings["bits"], weight.shape[-1]
    each = 1 if len(weight.shape) == 2 else weight.shape[1]
    codes, scale = (parts[role].flatten(0, -2) for role in (CODES, "scale"))
    if mode == "affine":
        bias = parts["bias"].flatten(0, -2)
    elif mode == "nvfp4":
        scale = scale.view(torch.float8_e4m3fn)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        if mode == "affine":
            unpack(codes[start:stop], bits, out)
        elif bits == 4:
            look_up(codes[start:stop], e2m1_pairs(), out)
        else:
            write_plain(codes[start:stop].view(torch.float8_e4m3fn), out)
        factors = scale_values(scale[start:stop])
        if "global_scale" in parts:
            matrices = torch.arange(start, stop) // weight.shape[-2]
            factors *= parts["global_scale"].view(-1, 1)[matrices] / _LARGEST_NVFP4
        scale_groups(out, factors, offset=bias[start:stop].to(torch.float32) if mode == "affine" else None)

    return decode_rows(first * each, last * each, columns, fill).view(-1, *weight.shape[1:])
