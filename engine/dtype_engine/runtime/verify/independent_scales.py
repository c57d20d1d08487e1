"""Quantizes to formats with a scale for each channel or tensor in plain torch, to check what the exporter writes."""

from __future__ import annotations

import math

import torch

from dtype_engine.core import dtypes
from dtype_engine.runtime.formats.dequantize import torch_dtype


def quantize_independently(
    values: torch.Tensor, dtype: str, shared: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a tensor in float8 or int8, computed in plain torch by the formula in `numerics.quantize`.

    scale = max |w| / (the dtype's largest value), per channel (dimension 0), row or tensor, over finite values only. The scale is 1
    if all values are zero. It is never below float32's smallest normal value, and never so large that the largest code times the
    scale is infinite. Codes are w / scale, clamped and rounded half to even; NaN is 0 in int8. shared: the largest |w| of all
    tensors that have a common scale with this one; if None, this tensor shares no scale.
    """
    row = dtypes.BY_NAME[dtype]
    wide = values.to(torch.float32)
    per_channel = wide.ndim >= 2 and not row.per_tensor
    height = math.prod(wide.shape[:-1]) if row.scales == "row" else wide.shape[0] if per_channel else 1
    rows = wide.reshape(height, -1) if per_channel and wide.numel() else wide.reshape(1, -1)
    count = dtypes.scale_count(tuple(values.shape), dtype)
    if not wide.numel():
        return torch.empty(values.shape, dtype=torch_dtype(dtype)), torch.ones(count)
    largest = torch.where(torch.isfinite(rows), rows, 0.0).abs().amax(dim=1)
    largest = largest if shared is None else torch.full_like(largest, shared)
    scale = torch.where(largest > 0, (largest / row.max).clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    scale = torch.where(torch.isinf(scale * row.max), torch.nextafter(scale, torch.zeros_like(scale)), scale)
    codes = (rows / scale[:, None]).clamp(-row.max, row.max)
    if row.kind == "int":
        codes = torch.where(torch.isnan(codes), 0.0, codes).round()
    return codes.to(torch_dtype(dtype)).reshape(values.shape), scale


def decode_channels(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of codes with a scale for each channel (dimension 0) or row (the last), or with one scale."""
    flat = scale.reshape(-1)
    if codes.ndim > 2 and len(flat) not in (1, len(codes)):
        return codes.to(torch.float32) * flat.reshape(*codes.shape[:-1], 1)
    return codes.to(torch.float32) * (flat.reshape(-1, *[1] * (codes.ndim - 1)) if codes.ndim else flat)
