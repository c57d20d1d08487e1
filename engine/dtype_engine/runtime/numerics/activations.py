"""Rounds activations to the format of the weight that multiplies them, as runtimes do in W8A8 and W4A4. Scales are
computed from the activations themselves, unless the files have one for all inputs of a layer (a static scale).

- fp8 and int8: one scale for each token, amax / 448 or amax / 127 over its channels (vLLM's `dynamic_per_token_scaled_fp8_quant`
  and `dynamic_scaled_int8_quant`), whatever has one scale in the weight.
- Block formats: blocks lie along the channels of a token, with the block length and the scale rule of the weight. For fp8 in blocks
  of 128 x 128, a block is 128 channels of one token. NVFP4's tensor scale is computed from all tokens of the operation, or
  is the static one.
- Types of llama.cpp: blocks of 32 or 256 channels of a token in 8 bits, as llama.cpp's CPU code rounds them.
- fp8 and int8 with a static scale: code = values / scale, and a value beyond the largest code saturates (vLLM's
  `static_scaled_fp8_quant` and `static_scaled_int8_quant`).

Values that are not finite stay unchanged, so that measurements still report them. The arithmetic is in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from dtype_engine.core import dtypes
from dtype_engine.core.llama_types import llama_type
from dtype_engine.runtime.device import divide
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.formats.llama_blocks import rounded_inputs
from dtype_engine.runtime.formats.nvfp4 import LARGEST
from dtype_engine.runtime.formats.quantize_blocks import rounded
from dtype_engine.runtime.numerics.quantize import values_in


@dataclass(frozen=True, slots=True)
class InputFormat:
    """How runtimes round the activations that a weight multiplies."""

    dtype: str
    """A format of `core.dtypes`: inputs are rounded as for weights in this format."""
    scale: float | None = None
    """The static scale of all inputs, by which a code of fp8 or int8, or NVFP4's scale of a block, is multiplied. None if scales
    are computed from the inputs.
    """

    @property
    def name(self) -> str:
        """The name of the format in which the inputs are: `dtype`, or what llama.cpp has for weights in one of its types."""
        row = llama_type(self.dtype)
        return self.dtype if row is None else row.inputs


def quantize_activations(values: torch.Tensor, dtype: str, scale: float | None = None) -> torch.Tensor:
    """Return activations [..., channels] rounded as for weights in the format `dtype`, in their own dtype and shape. scale: the
    static scale of all inputs, or None if scales are computed from the activations.
    """
    if not values.numel():
        return values
    rows = values.detach().reshape(-1, values.shape[-1])
    row = dtypes.BY_NAME[dtype]
    if row.llama is not None:
        found = rounded_inputs(rows, row.llama.inputs).to(values.dtype)
    elif row.blocks is None and scale is not None:
        found = _with_scale(rows, row, scale)
    elif row.blocks is None:
        found = values_in(rows, row.torch_name, values.dtype)
    else:
        element = msgspec.structs.replace(row, blocks=msgspec.structs.replace(row.blocks, rows=1))
        found = rounded(rows, element, None if scale is None else scale * LARGEST)
    found = found.view(values.shape)
    if not bool(torch.isfinite(values.sum())):
        found = torch.where(torch.isfinite(values), found, values)
    return found


def _with_scale(values: torch.Tensor, row: dtypes.DType, scale: float) -> torch.Tensor:
    codes = divide(values.float(), scale)
    if row.kind == "int":
        codes = codes.round_().clamp_(-row.max - 1, row.max)
    else:
        codes = codes.clamp_(-row.max, row.max).to(torch_dtype(row.torch_name)).float()
    return codes.mul_(scale).to(values.dtype)
