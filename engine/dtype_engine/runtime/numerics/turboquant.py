"""Rounds keys and values as vLLM's TurboQuant formats do (`model_executor/layers/quantization/turboquant` and
`v1/attention/ops/triton_turboquant_store.py` of vLLM 0.33). The arithmetic is in float32.

- Keys: x / |x| is rotated by a Hadamard matrix (`rotations`), and each channel gets the nearest of 8 or 16 codes. What is read is
  the vector of codes, divided by its own norm, rotated back, times |x| in float16. That is the `nc` (norm correction) in the names.
- Values: codes round((x - min) / scale) with scale = (max - min) / (2^bits - 1). Scale and minimum are read in float16.
- The codes are those of Lloyd and Max for a normal distribution with variance 1 / width: each code is the mean of the interval of
  values that are nearest to it.
"""

from __future__ import annotations

import functools
import math

import torch

from dtype_engine.runtime.device import divide
from dtype_engine.runtime.numerics.rotations import hadamard

_STEPS, _TOLERANCE, _INTERVALS = 200, 1e-10, 200
"""vLLM's search for codes: at most so many steps, until no code changes by more than this, with integrals in so many parts."""


def rounded_keys(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return keys [rows, width] after rounding to `bits` bits for a channel. width is a power of two."""
    width = rows.shape[-1]
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    turned = divide(hadamard(rows / (norms + 1e-8)), math.sqrt(width))
    codes = torch.tensor(codebook(width, bits), dtype=torch.float32, device=rows.device)
    middles = divide(codes[:-1] + codes[1:], 2)
    found = codes[torch.bucketize(turned, middles, right=True)]
    found = found / (found.square().sum(-1, keepdim=True) + 1e-16).sqrt()
    return divide(hadamard(found), math.sqrt(width)) * norms.half().float()


def rounded_values(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return values [rows, width] after rounding to `bits` bits for a channel."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    scale = divide(high - low, (1 << bits) - 1).clamp_(min=1e-8)
    codes = ((rows - low) / scale).add_(0.5).floor_().clamp_(0, (1 << bits) - 1)
    return codes * scale.half().float() + low.half().float()


@functools.cache
def codebook(width: int, bits: int) -> tuple[float, ...]:
    """Return the 2^bits codes of keys with `width` channels, in ascending order, before they are rounded to float32."""
    sigma, count = math.sqrt(1 / width), 1 << bits
    edge = 3.5 * sigma
    codes = torch.tensor([-edge + 2 * edge * (index + 0.5) / count for index in range(count)], dtype=torch.float64)
    ends = torch.tensor([3 * edge], dtype=torch.float64)
    parts = torch.arange(_INTERVALS + 1, dtype=torch.float64)
    for _ in range(_STEPS):
        edges = torch.cat([-ends, (codes[:-1] + codes[1:]) / 2, ends])
        at = edges[:-1, None] + parts * ((edges[1:] - edges[:-1]) / _INTERVALS)[:, None]
        density = torch.exp(-at.square() * width / 2)
        density[:, 0] /= 2
        density[:, -1] /= 2
        means = (at * density).sum(1) / density.sum(1)
        moved = float((means - codes).abs().max())
        if moved < _TOLERANCE:
            break
        codes = means
    return tuple(codes.tolist())
