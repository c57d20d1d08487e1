"""Rounds activations to the format of the weight that multiplies them, as runtimes do in W8A8 and W4A4. Scales are dynamic: they
are computed from the activations themselves.

- fp8 and int8: one scale for each token, amax / 448 or amax / 127 over its channels (vLLM's `dynamic_per_token_scaled_fp8_quant`
  and `dynamic_scaled_int8_quant`), even if the weight has one scale for the whole tensor.
- Block formats: blocks lie along the channels of a token, with the block length and the scale rule of the weight. For fp8 in blocks
  of 128 x 128, a block is 128 channels of one token. NVFP4's tensor scale is computed from all tokens of the operation, while a
  checkpoint would have one from calibration.

Values that are not finite stay unchanged, so that measurements still report them. The arithmetic is in float32.
"""

from __future__ import annotations

import dataclasses

import torch

from dtype_engine.core import dtypes
from dtype_engine.runtime.formats.quantize_blocks import rounded
from dtype_engine.runtime.numerics.quantize import values_in


def quantize_activations(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return activations [..., channels] after quantizing and dequantizing them, in the dtype and shape of `values`. dtype: the
    format of the weight that multiplies them, such as "int8".
    """
    if not values.numel():
        return values
    rows = values.detach().reshape(-1, values.shape[-1])
    row = dtypes.BY_NAME[dtype]
    if row.blocks is None:
        found = values_in(rows, dtype.removesuffix(dtypes.PER_TENSOR), values.dtype)
    else:
        element = dataclasses.replace(row, blocks=dataclasses.replace(row.blocks, rows=1))
        found = rounded(rows, element)
    found = found.view(values.shape)
    if not bool(torch.isfinite(values.sum())):
        found = torch.where(torch.isfinite(values), found, values)
    return found
