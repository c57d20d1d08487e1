"""Decodes bitsandbytes: NF4 and FP4 with a scale for each block of successive values, and int8 with a scale for each row."""

from __future__ import annotations

import math

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import decode_rows, look_up, pairs, scale_groups, write_plain

_LARGEST = 127
"""The int8 code of the largest |value| of a row, which is stored as the row's scale."""


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of a bitsandbytes weight from `first` up to `last` along its first dimension. With 8 bits, a value is code
    / 127 times the scale of its row. With 4 bits, it is the entry of the stored table for its code, times the scale of its block.
    """
    if "scale" in parts:
        return _eight_bits(parts, first, last)
    columns = math.prod(weight.shape[1:])
    block = weight.settings["block"]
    codes = parts[CODES].reshape(-1).view(torch.uint8)
    table = pairs(parts["quant_map"], high_first=True)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        low, high = start * columns // block, -(-stop * columns // block)  # the blocks that the rows touch
        held = codes[low * block // 2 : high * block // 2]
        exact = not columns % block
        values = out.view(-1) if exact else torch.empty(2 * len(held), dtype=torch.float32)
        look_up(held, table, values)
        scale = _factors(weight, parts, low, high)
        if exact:
            scale_groups(values[None], scale[None])
        else:
            values.mul_(scale.repeat_interleave(block)[: len(values)])
            out.copy_(values[start * columns - low * block :][: out.numel()].view(out.shape))

    return decode_rows(first, last, columns, fill).view(-1, *weight.shape[1:])


def _factors(weight: CodedWeight, parts: Parts, low: int, high: int) -> torch.Tensor:
    """Return the scales of the blocks from `low` up to `high`. With nested quantization, they are decoded from the stored codes."""
    factors = parts["absmax"][low:high]
    if "nested_absmax" not in parts:
        return factors
    nested = parts["nested_absmax"][torch.arange(low, high) // weight.settings["nested_block"]]
    return parts["nested_quant_map"][factors.to(torch.int32)].mul_(nested).add_(weight.settings["offset"])


def _eight_bits(parts: Parts, first: int, last: int) -> torch.Tensor:
    scale = parts["scale"].view(-1, 1)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        write_plain(parts[CODES][start:stop], out)
        out.mul_(scale[start:stop]).div_(_LARGEST)

    return decode_rows(first, last, parts[CODES].shape[1], fill)
