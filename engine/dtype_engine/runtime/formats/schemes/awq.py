"""Decodes AWQ's layouts: 4-bit codes packed along the outputs ("gemm") or along the inputs ("gemv")."""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, EncodedWeight
from dtype_engine.runtime.formats.schemes.parts import Parts
from dtype_engine.runtime.formats.schemes.words import decode_rows, scale_groups, unpack

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight that share a word in AWQ's "gemm" layout, whose code is in each nibble of the word, lowest nibble first."""


def decode(weight: EncodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the rows from `first` up to `last` of a weight [out, in]: (code - zero point) times scale, in float32."""
    return (_gemm if weight.settings["layout"] == "gemm" else _gemv)(weight, parts, first, last)


def _gemm(weight: EncodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    low, high = first // 8, -(-last // 8)  # the words in which the rows lie
    groups, columns = len(parts["scale"]), weight.shape[1]
    scale = parts["scale"][:, 8 * low : 8 * high].t().to(torch.float32).contiguous()
    zero = torch.empty(8 * (high - low), groups)
    _unpack_outputs(parts["zero"][:, low:high], zero)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        _unpack_outputs(parts[CODES][:, start // 8 : stop // 8], out)
        rows = slice(start - 8 * low, stop - 8 * low)
        scale_groups(out, scale[rows], zero[rows])

    return decode_rows(8 * low, 8 * high, columns, fill)[first - 8 * low : last - 8 * low]


def _unpack_outputs(words: torch.Tensor, out: torch.Tensor) -> None:
    """Write the codes of words [columns, rows / 8] to `out`, float32 [rows, columns]."""
    words = words.t().contiguous()
    rows = out.view(len(words), 8, -1)
    for nibble, row in enumerate(_ORDER):
        rows[:, row] = (words >> (4 * nibble)).bitwise_and_(15)


def _gemv(weight: EncodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    groups = weight.shape[1] // weight.settings["group"]  # the file has more, to fill words
    scale = parts["scale"][first:last, :groups].to(torch.float32)
    zero = torch.empty(last - first, parts["scale"].shape[1])
    unpack(parts["zero"][first:last], 4, zero)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        unpack(parts[CODES][start:stop], 4, out)
        rows = slice(start - first, stop - first)
        scale_groups(out, scale[rows], zero[rows, :groups])

    return decode_rows(first, last, weight.shape[1], fill)
