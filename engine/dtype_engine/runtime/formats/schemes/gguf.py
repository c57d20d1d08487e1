"""Decodes the tensors of GGUF files, and undoes what llama.cpp's converter did to the order of rows and to Gemma's norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.checkpoint.schemes.gguf import DECODED_HERE
from dtype_engine.core.errors import UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.text import printable
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import unpack

_VALUES_AT_ONCE = 1 << 20
"""How many values are decoded at once. The gguf package allocates several float32 arrays of this size."""


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of a GGUF weight from `first` up to `last` along its first dimension, in transformers' order of rows. The
    setting `offset`, if there is one, is added to them. F32, F16 and BF16 are only widened.
    """
    packed, heads = weight.parts[CODES].packed, weight.settings.get("heads")
    if packed and len(weight.shape) == 1:  # a vector is one row of blocks
        codes, packed = _dequantize(weight, parts[CODES].view(1, -1)).view(-1, 1), False
    else:
        codes = parts[CODES].view(weight.shape[0], -1)
    rows = codes[first:last] if heads is None else codes[_rows_of_halves(weight.shape[0], heads, first, last)]
    values = _dequantize(weight, rows) if packed else rows.to(torch.float32)
    if "offset" in weight.settings:
        values = values + weight.settings["offset"]
    return values.reshape(last - first, *weight.shape[1:])


def _rows_of_halves(rows: int, heads: int, first: int, last: int) -> torch.Tensor:
    """Return the positions in the file of the rows from `first` up to `last` of an attention projection that has `rows` rows. In
    transformers, the first half of a head's rows comes before the second half; in a GGUF file, rows of the two halves alternate.
    """
    if rows % (2 * heads):
        raise UserError(f"{rows} rows are not {heads} heads of two halves each, as the header of the GGUF file says")
    half = rows // heads // 2
    index = torch.arange(first, last)
    head, row = index // (2 * half), index % (2 * half)
    return head * 2 * half + row % half * 2 + row // half


def _dequantize(weight: CodedWeight, rows: torch.Tensor) -> torch.Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    part = weight.parts[CODES]
    kind = GGMLQuantizationType[part.dtype.upper()]
    block, width = GGML_QUANT_SIZES[kind]
    blocks = rows.contiguous().view(-1, width)
    step = max(1, _VALUES_AT_ONCE // block)
    values = torch.empty(len(blocks) * block, dtype=torch.float32)
    with failures_as(UserError, f"{part.file}: the gguf package can't dequantize {printable(part.name)}"):
        for first in range(0, len(blocks), step):
            piece = _values(blocks[first : first + step], kind)
            values[first * block : first * block + len(piece)] = piece
    return values


def _values(blocks: torch.Tensor, kind: Any) -> torch.Tensor:
    """Return the float32 values, in one dimension, of GGUF blocks [blocks, bytes]. transformers decodes the types that it
    supports, because it is several times as fast as the gguf package. Both give the same values, bit by bit. Neither decodes Q1_0.
    """
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    if kind in GGML_BLOCK:
        values: torch.Tensor = dequantize(blocks, int(kind))
        return values
    if kind.name in DECODED_HERE:
        return _signs(blocks)
    from gguf.quants import dequantize as by_numpy

    with np.errstate(all="ignore"):
        return torch.from_numpy(by_numpy(blocks.numpy(), kind).reshape(-1))


def _signs(blocks: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of Q1_0, in one dimension. A block has a float16 d and 128 bits, the first in the lowest bit of the
    first byte. A value is d for 1 and -d for 0 (llama.cpp, ggml-quants.c, `dequantize_row_q1_0`).
    """
    scale, bits = blocks[:, :2].contiguous().view(torch.float16), blocks[:, 2:].contiguous()
    values = torch.empty(len(blocks), 8 * bits.shape[1], dtype=torch.float32)
    unpack(bits, 1, values)
    return values.mul_(2).sub_(1).mul_(scale.to(torch.float32)).view(-1)
