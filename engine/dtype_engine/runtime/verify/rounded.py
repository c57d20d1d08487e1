"""Checks weights of an export whose values a rounding such as GPTQ chose. They follow from calibration inputs, so they are not
computed again: what they have to satisfy is checked, without code of the exporter.

- Each scale is one that the rounding may choose: that of the block's largest |value| times a factor (`core.roundings`).
- Each code is one of the format.
- With the statistics of the calibration inputs, the mean squared error of the layer's output is not larger than that
  of the nearest values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dtype_engine.core import dtypes
from dtype_engine.core.roundings import SCALE_FACTORS, scale_factors
from dtype_engine.runtime.numerics.roundings import WeightStatistics
from dtype_engine.runtime.verify.independent_block_formats import (
    candidate_scales,
    decoded_independently,
    quantize_blocks_independently,
)
from dtype_engine.runtime.verify.independent_scales import decode_channels, quantize_independently

_TOLERANCE = 1e-4
"""The share by which the error may be larger than that of the nearest values: float32 sums are inexact."""


def problem_of_codes(
    values: torch.Tensor, stored: Sequence[torch.Tensor], dtype: str, shared: float | None
) -> str | None:
    """Return what is wrong with the stored tensors of a weight, or None.

    values: the source's values. stored: the codes, scales and further tensors in the file. dtype: the format, without a rounding.
    shared: the largest |value| of the weights that share a tensor scale with this one, or None.
    """
    blocks = dtypes.BY_NAME[dtype].blocks
    if blocks is None:
        return _problem_of_channels(values, stored, dtype, shared)
    decoded, scale, zero = decoded_independently(stored, dtype, values.shape)
    unknown = np.ones(scale.shape, bool)
    for _, shown, of_zero in candidate_scales(values, dtype, scale_factors(blocks.scale), shared):
        same = shown == scale
        unknown &= ~(same if zero is None else same & (of_zero == zero))
    if unknown.any():
        return f"{int(unknown.sum())} of {unknown.size} scales are none that the rounding may choose"
    if blocks.tensor_scale and not torch.equal(stored[2], quantize_blocks_independently(values, dtype, shared)[2]):
        return "has another scale of the whole tensor"
    return _problem_of_values(decoded)


def _problem_of_channels(
    values: torch.Tensor, stored: Sequence[torch.Tensor], dtype: str, shared: float | None
) -> str | None:
    scale = stored[1].reshape(-1)
    unknown = torch.ones(scale.shape, dtype=torch.bool)
    for factor in SCALE_FACTORS:
        largest = None if shared is None else float(np.float32(shared) * np.float32(factor))
        of_factor = quantize_independently(values.float() * factor, dtype, largest)[1].reshape(-1)
        unknown &= of_factor != scale
    if unknown.any():
        return f"{int(unknown.sum())} of {unknown.numel()} scales are none that the rounding may choose"
    return _problem_of_values(decode_channels(stored[0], scale))


def _problem_of_values(decoded: torch.Tensor) -> str | None:
    wrong = int((~torch.isfinite(decoded)).sum())
    return f"{wrong} codes are no numbers" if wrong else None


def has_larger_error(
    source: torch.Tensor,
    stored: Sequence[torch.Tensor],
    dtype: str,
    given: WeightStatistics,
    shared: float | None,
    index: int | None = None,
) -> str | None:
    """Return a sentence if the mean squared error of a layer's output is larger with the stored values than with the nearest ones,
    or None.

    source: the source's values. stored, shared: as for `problem_of_codes`. dtype: a format with a rounding. given: the statistics
    of the weight's inputs. index: the index of the weight's first dimension that the tensor is, such as an expert's number, or None
    if it is the whole weight.
    """
    plain = dtypes.unrounded(dtype)
    wide = source.to(torch.float32)
    if dtypes.BY_NAME[plain].blocks is None:
        nearest = decode_channels(*quantize_independently(wide, plain, shared))
        chosen = decode_channels(stored[0], stored[1])
    else:
        nearest = decoded_independently(quantize_blocks_independently(wide, plain, shared), plain, wide.shape)[0]
        chosen = decoded_independently(stored, plain, wide.shape)[0]
    least = most = 0.0
    for number, part in given.parts.items():
        if index is not None and number != index:
            continue
        of_part = (number,) if index is None and number is not None else ()
        weights = (
            part.squares if dtypes.BY_NAME[dtype].rounding == "imatrix" or part.products is None else part.products
        )
        most += _error((chosen - wide)[of_part], weights, given.across)
        least += _error((nearest - wide)[of_part], weights, given.across)
    if most <= least * (1 + _TOLERANCE):
        return None
    return f"makes the error of its layer's output larger than the nearest values do: {most:.3e} for {least:.3e}"


def _error(difference: torch.Tensor, weights: torch.Tensor, across: int) -> float:
    """Return tr(D H Dᵀ). weights: H, float32 [channels, channels], or its diagonal [channels]."""
    of_outputs = (difference if across == 1 else difference.T).double()
    wide = weights.double()
    if weights.ndim == 1:
        return float((of_outputs.square() * wide).sum())
    return float(torch.einsum("oi,ij,oj->", of_outputs, wide, of_outputs))
