"""Decodes HQQ: a weight's codes, row by row, are cut into equal runs, and each element packs one code of every run, the first in
the highest bits.
"""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import decode_rows, scale_groups


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of an HQQ weight from `first` up to `last` along its first dimension: (code - zero point) times scale."""
    bits, together, axis = (weight.settings[key] for key in ("bits", "together", "axis"))
    packed = parts[CODES].view(-1)
    columns = weight.shape[1]
    # The scales become [rows, groups in a row] for axis 1, or [n, in] for axis 0, where rows r and r + n share scales.
    across = len(parts["scale"]) // weight.shape[0] if axis else columns
    scale, zero = (parts[role].view(-1, across) for role in ("scale", "zero"))

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

    return decode_rows(first, last, columns, fill)
