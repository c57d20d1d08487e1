"""Rounds a state of a recurrent layer to one of its formats and back.

Stochastic rounding is that of PTX's `cvt.rs.f16x2.f32`, with which vLLM, SGLang and FlashInfer write float16 states: a value
between two neighbouring numbers of float16 becomes one of both, the nearer one with the higher probability, so that the mean error
is 0. A value that float16 has stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtype_engine.core.kv_formats import KV_FORMATS, STOCHASTIC
from dtype_engine.runtime.formats.dequantize import torch_dtype

_BITS, _LEAST = 10, -14
"""The bits of float16's mantissa, and its least exponent: smaller numbers are subnormal, at distances of 2^-24."""


def round_state(state: torch.Tensor, form: str, random: Callable[[torch.Size], torch.Tensor]) -> torch.Tensor:
    """Return a state of any shape after rounding to a format of `STATE_FORMATS`, in its own dtype. A value beyond the largest
    number of float16 becomes infinite, as in a runtime.

    random: returns float32 numbers of a shape, uniform in [0, 1), on the CPU. It is called for stochastic rounding alone.
    """
    values = state.detach()
    if form != STOCHASTIC:
        return values.to(torch_dtype(KV_FORMATS[form].dtype)).to(values.dtype)
    wide = values if values.dtype == torch.float64 else values.float()
    exponent = torch.frexp(wide).exponent - 1
    distance = torch.ldexp(torch.ones_like(wide), exponent.clamp_(min=_LEAST) - _BITS)
    steps = wide.abs() / distance  # exact, as are the next two operations: the distance is a power of 2
    whole = steps.floor()
    up = random(values.shape).to(values.device) < steps - whole
    found = ((whole + up) * distance).copysign(wide).half().to(values.dtype)
    return torch.where(torch.isfinite(values), found, values)
