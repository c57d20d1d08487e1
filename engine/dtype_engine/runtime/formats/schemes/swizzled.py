"""Scales in the order in which NVIDIA's tensor cores read them."""

from __future__ import annotations

import torch


def unswizzle(scale: torch.Tensor, columns: int, first: int, last: int) -> torch.Tensor:
    """Return the scales of the rows from `first` up to `last` as [rows, columns], in their dtype.

    scale: all scales in tiles of 128 rows x 4 columns, tile after tile along the columns, padded to whole tiles. In a tile, the
    scale of row r and column c is at (r % 32) * 16 + r // 32 * 4 + c (cuBLAS documentation, "1D Block Scaling Factors Layout").
    """
    low, high = first // 128, -(-last // 128)
    tiles = scale.view(torch.uint8).reshape(-1, -(-columns // 4), 32, 4, 4)[low:high]
    rows = tiles.permute(0, 3, 2, 1, 4).reshape(128 * (high - low), -1)
    return rows[first - 128 * low : last - 128 * low, :columns].contiguous().view(scale.dtype)
