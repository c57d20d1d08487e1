"""Rounds weights to llama.cpp's own types by llama.cpp's reference code, which the package `libgguf` has, and activations by the
same formulas in torch.

A row of a weight is a row of blocks, as in GGUF files. The order of rows does not matter, so llama.cpp's other order of queries and
keys makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import INPUT_BLOCKS, InputType, LlamaType, fitted, llama_type
from dtype_engine.runtime.device import divide
from dtype_engine.runtime.formats.row_blocks import parallel_map, row_slices

_LARGEST = 2.0**28
"""The largest |value| that the reference code gets, because it aborts the process where squares overflow. The float16 scales of
most types overflow before.
"""
_FLOATS = {"float32": torch.float32, "float16": torch.float16}


@cache
def _library() -> Any:
    """Return the package `libgguf`. Raises UserError if it is not installed."""
    try:
        import libgguf
    except ImportError:
        raise UserError(
            "llama.cpp's types need its reference code, in the package libgguf: pip install 'dtype-tui[llama.cpp]'"
        ) from None
    return libgguf


def rounded(tensor: torch.Tensor, dtype: str, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values of a tensor in a type of llama.cpp, or in what llama-quantize makes of it if the tensor can't have that
    type: float32, in the tensor's shape. Values that are not finite stay as they are, and count as 0 in their block. Where the
    float16 scale of a block overflows, its values are not finite.

    dtype: a name in `core.llama_types.LLAMA_DTYPES`. weights: what the squared error counts in each channel, float32 [width]; by
    default, what llama.cpp takes without an imatrix or, for a type whose code needs one, 1. Raises UserError if libgguf is missing.
    """
    wide = tensor.detach().to(torch.float32)
    given = fitted(dtype, tensor.shape)
    row = llama_type(given)
    if row is None:
        return wide.to(_FLOATS[given]).to(torch.float32)
    if not tensor.numel():
        return wide
    rows = wide.reshape(-1, tensor.shape[-1]).cpu()
    values = torch.empty_like(rows)
    pieces = row_slices(rows)
    of_channels = _channel_weights(row, weights, rows.shape[1])
    library = _library()

    def work(indices: Iterable[int]) -> None:
        for piece in map(pieces.__getitem__, indices):
            finite = torch.isfinite(rows[piece])
            part = torch.where(finite, rows[piece], 0.0).clamp_(-_LARGEST, _LARGEST)
            made = library.dequantize_rows(
                library.quantize_rows(part.numpy(), row.kind, of_channels), row.kind, rows.shape[1]
            )
            values[piece] = torch.where(finite, torch.from_numpy(made), rows[piece])

    parallel_map(work, len(pieces))
    return values.view(tensor.shape).to(tensor.device)


def file_blocks(rows: torch.Tensor, dtype: str, weights: torch.Tensor | None = None) -> npt.NDArray[np.uint8]:
    """Return the blocks of a matrix as a GGUF file has them: uint8 [rows, bytes of a row]. rows: finite values [rows, width], of
    which each row is whole blocks. dtype, weights: as for `rounded`. Raises UserError if libgguf is missing.
    """
    row = llama_type(dtype)
    assert row is not None
    of_channels = _channel_weights(row, weights, rows.shape[1])
    blocks: npt.NDArray[np.uint8] = _library().quantize_rows(rows.float().numpy(), row.kind, of_channels)
    return blocks


def rounded_inputs(rows: torch.Tensor, form: InputType) -> torch.Tensor:
    """Return activations as llama.cpp's CPU code rounds them before a product: float32 [tokens, channels], like `rows`, which may
    be of any float dtype. The last block of a row may be shorter than the others. Values that are not finite count as 0.

    The formulas are those of `quantize_row_q8_0_ref`, `quantize_row_q8_1_ref` and `quantize_row_q8_K_ref` in `ggml-quants.c`: the
    largest |value| of a block gets the code 127; q8_0 and q8_1 have a float16 scale and round halves away from zero, q8_k has a
    float32 scale and rounds halves to even. The sum of a block's codes, which q8_1 keeps in float16, is exact here.
    """
    size = INPUT_BLOCKS[form]
    finite = rows.float().nan_to_num(0.0, 0.0, 0.0)
    blocks = functional.pad(finite, (0, -rows.shape[1] % size)).view(len(rows), -1, size)
    amax = blocks.abs().amax(-1, keepdim=True)
    if form == "q8_k":
        inverse = torch.full_like(amax, 127) / amax
        scale, codes = 1 / inverse, (blocks * inverse).round_()
    else:
        exact = divide(amax, 127)
        scaled = blocks * (1 / exact)
        codes = scaled.trunc()
        codes += scaled.sign() * ((scaled - codes).abs() >= 0.5)
        scale = exact.half().float()
    values = torch.where(scale > 0, codes * scale, 0.0)  # a block of zeros has no scale
    return values.view(len(rows), -1)[:, : rows.shape[1]]


def _channel_weights(row: LlamaType, weights: torch.Tensor | None, width: int) -> npt.NDArray[np.float32] | None:
    if row.imatrix == "unused":
        return None
    if weights is None:
        return np.ones(width, np.float32) if _library().quantize_requires_imatrix(row.kind) else None
    return weights.to(torch.float32).cpu().numpy()
