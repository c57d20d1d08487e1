"""Runs the candidate model: the model with its currently cast weights, as plain torch would run it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from dtype_engine.core import dtypes
from dtype_engine.runtime.formats.dequantize import dequantize, dequantized_rows
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.activations import ActivationRounding
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.numerics.activations import InputFormat


class CandidateMode(WeightMode):
    """The torch-function mode for candidate runs, which compute with the weights as they are cast.

    A weight in a format with scales, such as float8, is dequantized to the dtype of the activation in the same operation. If there
    is no activation, as in an embedding look-up, it is dequantized to `compute`. A weight that another program quantized and that
    no rule casts is decoded in each operation, and then rounded to the dtype that it would have in an unquantized model.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        compute: torch.dtype,
        device: torch.device,
        rounding: ActivationRounding | None = None,
    ) -> None:
        replaced = (
            key for key, weight in weights.items() if weight.scale is not None or weight.decoded or weight.blockwise
        )
        super().__init__(weights, device, replaced, compute, rounding)

    def dtype_of(self, weight: Weight) -> torch.dtype:
        return candidate_dtype(weight, self.compute)

    def value_of(self, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
        return candidate_value(weight, dtype or self.compute)

    def rows_of(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        if weight.decoded:
            return weight.stored.gather(ids).to(self.dtype_of(weight))
        data, scale = weight.current()
        if scale is None:
            return functional.embedding(ids, data)
        return dequantized_rows(data, scale, weight.dtype, ids, self.compute)

    def part_of(self, weight: Weight, index: int) -> torch.Tensor | None:
        if weight.decoded:
            part = weight.stored.part(index, weight.tensor.device)
            return None if part is None else part.to(self.dtype_of(weight))
        if not (weight.cast and weight.in_parts(weight.dtype) and 0 <= index < weight.stored.shape[0]):
            return None
        return _dequantized(weight, *weight.current_part(index), self.compute)[0]

    def is_quantized(self, weight: Weight) -> bool:
        return weight.has_scales

    def input_format(self, weight: Weight) -> InputFormat | None:
        return weight.input_format


def candidate_dtype(weight: Weight, compute: torch.dtype) -> torch.dtype:
    """Return the dtype of a weight in a candidate run. compute: the dtype of a weight in a format with scales."""
    return compute if weight.has_scales else weight.tensor.dtype


def candidate_value(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight as it is currently cast: in `dtype` if it has scales, otherwise in its own dtype."""
    if weight.decoded:
        return weight.stored.read_in(candidate_dtype(weight, dtype), weight.tensor.device)
    return _dequantized(weight, *weight.current(), dtype)


def _dequantized(weight: Weight, data: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return data if scale is None else dequantize(data, scale, dtype, dtypes.BY_NAME[weight.dtype].blocks)
