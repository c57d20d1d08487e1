"""Rounds weights to llama.cpp's own types by llama.cpp's reference code, which the package `libgguf` has.

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

from dtype_engine.core.errors import UserError
from dtype_engine.core.llama_types import LlamaType, fitted, llama_type
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


def _channel_weights(row: LlamaType, weights: torch.Tensor | None, width: int) -> npt.NDArray[np.float32] | None:
    if row.imatrix == "unused":
        return None
    if weights is None:
        return np.ones(width, np.float32) if _library().quantize_requires_imatrix(row.kind) else None
    return weights.to(torch.float32).cpu().numpy()
