"""Rounds keys and values of a KV cache to one of its formats and back. The arithmetic is in float32.

- Formats without scales, such as vLLM's `fp8`: a value beyond the largest code saturates. Static scales: amax / 448, where amax is
  the largest |value| over the calibration inputs.
- With a scale for each token and head, fp8 and int8 are symmetric: amax / 448 or amax / 127.
- int4 with a scale for each token and head is that of vLLM 0.33 (`v1/attention/ops/int4_per_token_head.py`). The channels of a head
  are rotated (`rotations`) and brought into the dtype of the cache's values. Then scale = (max - min) / 15, the zero point is
  round(-min / scale), and code = round(x / scale + zero point), all from 0 to 15. vLLM stores the zero point in the scale's last
  four bits, and reads the scale with zeros there. Its GPU kernels rotate in bfloat16; here, the rotation is in float32.
- TurboQuant: see `turboquant`.
- KIVI (Liu et al., 2024): code = round((x - min) / scale) with scale = (max - min) / (2^bits - 1), both in float16. Keys have
  groups of 32 tokens in one channel; of n tokens, the newest n modulo 128 are not rounded. Values have groups of 32 channels
  in one token; the newest 128 tokens are not rounded.

Values that are not finite stay unchanged, so that measurements report them. A rotation takes them as 0.
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
from dtype_engine.runtime.numerics.rotations import signed_hadamard, undo_signed_hadamard
from dtype_engine.runtime.numerics.turboquant import rounded_keys, rounded_values


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


def round_queries(queries: torch.Tensor) -> torch.Tensor:
    """Return queries after rounding to float8_e4m3fn without a scale, in their own dtype. Values that are not finite stay."""
    queries = queries.detach()
    return torch.where(torch.isfinite(queries), _in_float8(queries, "float8_e4m3fn").to(queries.dtype), queries)


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
    if form.scales == "turboquant":
        rows = rows.float().nan_to_num(0.0, 0.0, 0.0)
        if keys and form.bits == 8:
            return _in_float8(rows, "float8_e4m3fn").view(values.shape)
        found = rounded_keys(rows, form.bits) if keys else rounded_values(rows, form.value_bits)
        return found.view(values.shape)
    if form.scales == "token":
        if form.bits == 4:
            return _rotated_int4(values)
        return values_in(rows, form.dtype, torch.float32).view(values.shape)
    row = dtypes.BY_NAME[form.dtype]
    if form.scales == "blocks":
        return rounded(rows.float(), row, None if amax is None else float(amax.max())).view(values.shape)
    if form.dtype in dtypes.COMPUTE_DTYPES:
        return values.to(torch_dtype(form.dtype))
    if amax is None:
        return _in_float8(values, form.dtype)
    of_head = amax.to(values.device) if form.scales == "head" else amax.to(values.device).max()
    scale = amax_to_scale(of_head, row.max).view(-1, 1, 1)
    return _in_float8(values.float() / scale, form.dtype) * scale


def _in_float8(values: torch.Tensor, dtype: str) -> torch.Tensor:
    top = dtypes.BY_NAME[dtype].max
    return values.float().clamp(-top, top).to(torch_dtype(dtype)).float()


def _rotated_int4(values: torch.Tensor) -> torch.Tensor:
    turned = signed_hadamard(values.float().nan_to_num(0.0, 0.0, 0.0)).to(values.dtype).float()
    low, high = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
    scale = divide(high - low, 15).clamp_(min=1e-6)
    zero = (-low / scale).add_(0.5).floor_().clamp_(0, 15)
    codes = (turned * scale.reciprocal()).add_(zero).add_(0.5).floor_().clamp_(0, 15)
    read = scale.view(torch.int32).bitwise_and(-16).view(torch.float32)
    return undo_signed_hadamard(codes.sub_(zero).mul_(read))


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
