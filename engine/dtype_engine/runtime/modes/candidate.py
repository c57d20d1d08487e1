"""Runs the candidate model: the model with its currently cast weights, as plain torch would run it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from dtype_engine.core import dtypes
from dtype_engine.runtime.formats.dequantize import dequantize, dequantized_rows
from dtype_engine.runtime.model.live import Weight
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
        return candidate_rows(weight, ids, self.compute)

    def part_of(self, weight: Weight, index: int) -> torch.Tensor | None:
        return candidate_part(weight, index, self.compute)

    def is_quantized(self, weight: Weight) -> bool:
        return weight.has_scales

    def input_format(self, weight: Weight) -> InputFormat | None:
        return weight.input_format


def candidate_dtype(weight: Weight, compute: torch.dtype) -> torch.dtype:
    """Return the dtype that the model's code sees if it reads the `dtype` of a weight in a candidate run. compute: the dtype that
    it sees for a weight in a format with scales.
    """
    return compute if weight.has_scales else weight.tensor.dtype


def candidate_value(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight as it is currently cast. dtype: the dtype of the values if the weight is in a format with
    scales, such as float8. Any other weight keeps its own dtype.
    """
    if weight.decoded:
        return weight.stored.read_in(candidate_dtype(weight, dtype), weight.tensor.device)
    data, scale = weight.current()
    return data if scale is None else dequantize(data, scale, dtype, dtypes.BY_NAME[weight.dtype].blocks)


def candidate_part(weight: Weight, index: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the values of a weight as it is currently cast at one index of its first dimension, such as those of one expert.
    Returns None if they can't be made without the others. dtype: as for `candidate_value`.
    """
    if weight.cast and not weight.decoded and weight.in_parts(weight.dtype) and 0 <= index < weight.stored.shape[0]:
        data, scale = weight.current_part(index)
        values = data if scale is None else dequantize(data, scale, dtype, dtypes.BY_NAME[weight.dtype].blocks)
        return values[0]
    part = weight.stored.part(index, weight.tensor.device) if weight.decoded else None
    return None if part is None else part.to(candidate_dtype(weight, dtype))


def candidate_rows(weight: Weight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of an embedding table [rows, width] as it is currently cast: [*ids.shape, width]. ids: the indexes of the rows.
    dtype: the dtype of the result if the table is in a format with scales. Any other table keeps its own dtype.
    """
    if weight.decoded:
        return weight.stored.gather(ids).to(candidate_dtype(weight, dtype))
    data, scale = weight.current()
    return functional.embedding(ids, data) if scale is None else dequantized_rows(data, scale, weight.dtype, ids, dtype)
