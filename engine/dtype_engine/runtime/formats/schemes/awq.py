"""Decodes AWQ's layouts: "gemv", whose words hold 4-bit codes or zero points of one row, "gemv fast", and "gemm" (by
`block_scaled`).
"""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts, block_scaled
from dtype_engine.runtime.formats.schemes.unpack import decode_rows, scale_groups, unpack


def _decode_words(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    groups = weight.shape[1] // weight.settings["block"][1]  # the file may have more, which are padding

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        unpack(parts[CODES][start:stop], 4, out)
        zero = torch.empty(stop - start, groups, dtype=torch.float32)
        unpack(parts["zero_point"][start:stop], 4, zero)
        scale_groups(out, parts["scale"][start:stop, :groups].to(torch.float32), zero)

    return decode_rows(first, last, weight.shape[1], fill)


def _decode_fast(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Decode the layout "gemv fast". A value is code times scale plus offset. Four rows are stored together: first 64 codes of each
    of the four rows, then the next 64 codes of each, and so on. Within 32 codes of a row, code 8 i + 2 j + t is at position 8 j + 4
    t + i, for i, j in 0..3 and t in 0..1.
    """
    columns = weight.shape[1]
    groups = columns // weight.settings["block"][1]  # the file may have more, which are padding

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        codes = torch.empty((stop - start) // 4, 4 * columns)
        unpack(parts[CODES][start // 4 : stop // 4], 4, codes)
        rows = codes.view(-1, columns // 64, 4, 64).transpose(1, 2).reshape(-1, 4, 2, 4)
        out.view(-1, 4, 4, 2).copy_(rows.permute(0, 3, 1, 2))
        scale, offset = (parts[role][:groups, start:stop].t().to(torch.float32) for role in ("scale", "offset"))
        scale_groups(out, scale, offset=offset)

    low = first // 4 * 4
    return decode_rows(low, -(-last // 4) * 4, columns, fill)[first - low : last - low]


_DECODERS = {"gemm": block_scaled.decode, "gemv": _decode_words, "gemv fast": _decode_fast}


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of an AWQ weight from `first` up to `last` along its first dimension, in float32."""
    return _DECODERS[weight.settings["layout"]](weight, parts, first, last)
