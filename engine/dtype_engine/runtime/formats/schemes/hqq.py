"""Decodes HQQ and SINQ: a weight's codes, row by row, are cut into equal runs, and each element packs one code of every run, the
first in the highest bits.
"""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import decode_rows, scale_groups


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of a weight from `first` up to `last` along its first dimension: (code - zero point) times scale, and with
    SINQ times the scale of the column.
    """
    bits, together, axis = (weight.settings[key] for key in ("bits", "together", "axis"))
    packed = parts[CODES].view(-1)
    columns = weight.shape[1]
    # The scales become [rows, groups in a row] for axis 1, or [n, in] for axis 0, where rows r and r + n share scales.
    across = parts["scale"].numel() // weight.shape[0] if axis else columns
    scale, zero = (_numbers(parts, role).view(-1, across) for role in ("scale", "zero"))
    of_columns = parts["column_scale"].view(-1).to(torch.float32) if "column_scale" in parts else None

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        flat, begin = out.view(-1), start * columns
        done = 0
        while done < len(flat):
            part, offset = divmod(begin + done, len(packed))
            count = min(len(packed) - offset, len(flat) - done)
            codes = packed[offset : offset + count] >> (bits * (together - 1 - part))
            flat[done : done + count] = codes.bitwise_and_((1 << bits) - 1)
            done += count
        rows = torch.arange(start, stop) % len(scale)
        scale_groups(out, scale[rows].to(torch.float32), zero[rows].to(torch.float32))
        if of_columns is not None:
            out.mul_(of_columns)

    return decode_rows(first, last, columns, fill)


def _numbers(parts: Parts, role: str) -> torch.Tensor:
    """Return the scales or zero points of all groups (`role`), which may be codes of 8 bits with a step and a lowest number."""
    held = parts[role]
    if f"{role}_step" not in parts:
        return held
    step, low = (parts[f"{role}_{end}"].to(torch.float32) for end in ("step", "low"))
    return held.to(torch.float32).mul_(step).add_(low)
