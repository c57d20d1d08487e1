"""Decodes AWQ's "gemv" layout, in which a packed word holds 4-bit codes, or zero points, of one row. `block_scaled` decodes the
"gemm" layout.
"""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, EncodedWeight
from dtype_engine.runtime.formats.schemes.parts import Parts
from dtype_engine.runtime.formats.schemes.unpack import decode_rows, scale_groups, unpack


def decode(weight: EncodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the rows from `first` up to `last` of a weight [out, in]: (code - zero point) times scale, in float32. parts: its
    stored tensors, keyed by role.
    """
    groups = weight.shape[1] // weight.settings["block"][1]  # the file may have more, which are padding

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        unpack(parts[CODES][start:stop], 4, out)
        zero = torch.empty(stop - start, groups, dtype=torch.float32)
        unpack(parts["zero_point"][start:stop], 4, zero)
        scale_groups(out, parts["scale"][start:stop, :groups].to(torch.float32), zero)

    return decode_rows(first, last, weight.shape[1], fill)
