"""Rounds keys and values of a KV cache to one of its formats and back. The arithmetic is in float32.

- Formats without scales, such as vLLM's `fp8`: a value beyond the largest code saturates. Static scales: amax / 448, where amax is
  the largest |value| over the calibration inputs.
- With a scale for each token and head, fp8 and int8 are symmetric: amax / 448 or amax / 127. int4 has zero points: scale = (max
  - min) / 15, where max and min include 0, and the code round(-min / scale) is 0. vLLM's int4 also rotates the values of a head
  before it rounds them, which is left out.
- KIVI (Liu et al., 2024): code = round((x - min) / scale) with scale = (max - min) / (2^bits - 1), both in float16. Keys have
  groups of 32 tokens in one channel; of n tokens, the newest n modulo 128 are not rounded. Values have groups of 32 channels
  in one token; the newest 128 tokens are not rounded.

Values that are not finite stay unchanged, so that measurements report them.
"""

from __future__ import annotations

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.kv_formats import GROUP, KV_FORMATS, WINDOW
from dtype_engine.runtime.device import divide
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.formats.quantize_blocks import rounded
from dtype_engine.runtime.formats.scales import amax_to_scale
from dtype_engine.runtime.numerics.quantize import values_in


def round_cache(values: torch.Tensor, name: str, keys: bool, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Return keys or values [batch, heads, tokens, width] after rounding to a format of a KV cache, in their own dtype.

    name: the format, a key of `KV_FORMATS`. amax: for formats with calibrated scales, the largest |value| of each head, float32
    [heads]; if None, it is computed from `values`.
    """
    if not values.numel():
        return values
    values = values.detach()
    found = _rounded(values, name, keys, amax).to(values.dtype)
    if not bool(torch.isfinite(values.sum())):
        found = torch.where(torch.isfinite(values), found, values)
    return found


def head_amax(values: torch.Tensor) -> torch.Tensor:
    """Return the largest finite |value| of each head of keys or values [batch, heads, tokens, width]: float32 [heads]."""
    magnitudes = values.detach().float().abs().nan_to_num_(0.0, 0.0, 0.0)
    return magnitudes.transpose(0, -3).flatten(1).amax(1)


def _rounded(values: torch.Tensor, name: str, keys: bool, amax: torch.Tensor | None) -> torch.Tensor:
    form = KV_FORMATS[name]
    if form.scales == "kivi":
        return _kivi(values, form.bits, keys)
    rows = values.reshape(-1, values.shape[-1])
    amax = None if not form.calibrated else head_amax(values) if amax is None else amax
    if form.scales == "token":
        if form.bits == 4:
            return _with_zero_points(values.float())
        return values_in(rows, form.dtype, torch.float32).view(values.shape)
    row = dtypes.BY_NAME[form.dtype]
    if form.scales == "blocks":
        return rounded(rows.float(), row, None if amax is None else float(amax.max())).view(values.shape)
    target, scale = torch_dtype(form.dtype), torch.ones(1, device=values.device)
    if form.dtype in dtypes.COMPUTE_DTYPES:
        return values.to(target)
    if amax is not None:
        of_head = amax.to(values.device) if form.scales == "head" else amax.to(values.device).max()
        scale = amax_to_scale(of_head, row.max).view(-1, 1, 1)
    return (values.float() / scale).clamp_(-row.max, row.max).to(target).float() * scale


def _with_zero_points(values: torch.Tensor) -> torch.Tensor:
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    scale = divide(high - low, 15)
    zero = (-low / scale).nan_to_num_(0.0).round_()
    codes = (values / scale).nan_to_num_(0.0).round_().add_(zero).clamp_(0, 15)
    return codes.sub_(zero).mul_(scale)


def _kivi(values: torch.Tensor, bits: int, keys: bool) -> torch.Tensor:
    tokens = values.shape[-2]
    count = tokens - tokens % WINDOW if keys else max(0, tokens - WINDOW)
    old = values[..., :count, :].float()
    old = old.transpose(-1, -2) if keys else old
    groups = [_in_group(group, bits) for group in torch.split(old, GROUP, dim=-1)] if count else [old]
    found = torch.cat(groups, dim=-1)
    return torch.cat([found.transpose(-1, -2) if keys else found, values[..., count:, :].float()], dim=-2)


def _in_group(group: torch.Tensor, bits: int) -> torch.Tensor:
    low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
    scale = divide(high - low, (1 << bits) - 1).half().float()
    low = low.half().float()
    codes = ((group - low) / scale).nan_to_num_(0.0).round_().clamp_(0, (1 << bits) - 1)
    return codes * scale + low
