"""The candidate: the model with its currently cast weights, run as plain torch would run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from dtype_engine.core import dtypes
from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.modes.activations import ActivationRounding
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.numerics.quantize import dequantize


class CandidateMode(WeightMode):
    """Runs the model with its weights as they are cast.

    A weight in a format with scales, such as float8, is dequantized to the dtype of the activation in the same operation. If there
    is no activation, as in an embedding look-up, it is dequantized to `compute`.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        compute: torch.dtype,
        device: torch.device,
        rounding: ActivationRounding | None = None,
    ) -> None:
        stored = (key for key, weight in weights.items() if weight.scale is not None)
        super().__init__(weights, device, stored, compute, rounding)

    def value_of(self, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
        return dequantized(weight, dtype or self.compute)

    def rows_of(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        assert weight.scale is not None
        return dequantized_rows(weight.tensor.data, weight.scale, weight.dtype, ids, self.compute)

    def is_quantized(self, weight: Weight) -> bool:
        return weight.scale is not None


def dequantized(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight that is currently in a format with scales, such as float8, in `dtype`."""
    assert weight.scale is not None
    return dequantize(weight.tensor.data, weight.scale, dtype, dtypes.BY_NAME[weight.dtype].blocks)


def dequantized_rows(
    table: torch.Tensor, scale: torch.Tensor, storage: str, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return some rows of an embedding table [rows, width] that is stored in the format `storage`, dequantized to `dtype`:
    [*ids.shape, width].

    ids: the indexes of the rows. scale: the scales of the whole table.
    """
    index = ids.reshape(-1)
    rows = table.view(torch.uint8).index_select(0, index).view(table.dtype)
    blocks = dtypes.BY_NAME[storage].blocks
    if blocks is not None:
        rows = dequantize(rows, scale[index // blocks.rows], dtype, dataclasses.replace(blocks, rows=1))
    else:
        rows = dequantize(rows, scale[index] if len(scale) == len(table) else scale, dtype)
    return rows.view(*ids.shape, table.shape[1])
