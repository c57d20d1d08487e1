"""Activations, rounded to the format of the weight that they meet, as runtimes do in W8A8 and W4A4: dynamically, from their own
values.

- fp8 and int8: one scale for each token, amax / 448 or amax / 127 over its channels (vLLM's `dynamic_per_token_scaled_fp8_quant`
  and `dynamic_scaled_int8_quant`), also where the weight has one for the whole tensor;
- blocks: along the channels of a token, with the weight's own block length and scale rule; of fp8 in blocks of 128 x 128 that is
  128 of one token. NVFP4's scale of the tensor is that of all tokens that an operation is given, where a checkpoint would have one
  from calibration.

A value that is not finite stays what it is, so that a reading still tells of it. Computed in float32.
"""

from __future__ import annotations

import dataclasses

import torch

from dtype_engine.core import dtypes
from dtype_engine.runtime.formats.quantize_blocks import rounded
from dtype_engine.runtime.numerics.quantize import values_in


def quantize_activations(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Activations [..., channels] rounded to a storage dtype, in their own dtype and shape."""
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
