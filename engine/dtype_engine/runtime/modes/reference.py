"""The reference: the stored weights, each widened to float32 when it is used, without a second copy of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dtype_engine.runtime.model.live import LiveModel, Weight
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.modes.widening_buffer import WidenedWeights
from dtype_engine.runtime.numerics.quantize import dtype_name

_KEEPS_NO_ARGUMENT = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Operations whose result never shares memory with an argument, so that the memory of a widened weight can be reused at once."""


class ReferenceMode(WeightMode):
    """Runs the model with its stored weights in float32. A weight that the module holds in another dtype is cast to float32
    ("widened") for each operation that uses it.

    Weights stored in float64 stay in float64. An embedding look-up widens only the selected rows.

    widened: memory that large widened weights use one after another, on a CPU without gradients. Since each weight overwrites the
    previous one, no other mode may keep the tensors that it sees. If None, each widened weight is in new memory.
    """

    def __init__(
        self, weights: Mapping[int, Weight], device: torch.device, widened: WidenedWeights | None = None
    ) -> None:
        super().__init__(weights, device, (key for key, weight in weights.items() if not holds_reference(weight)))
        self.widened = widened if device.type == "cpu" else None

    def dtype_of(self, weight: Weight) -> torch.dtype:
        return reference_dtype(weight)

    def value_of(self, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
        return reference_value(weight, self.device)

    def values_of(self, weights: Sequence[Weight], dtype: torch.dtype | None, name: str) -> list[torch.Tensor]:
        if self.widened is not None and name in _KEEPS_NO_ARGUMENT and not torch.is_grad_enabled():
            return self.widened.values(weights, lambda weight: self.value_of(weight, dtype))
        return super().values_of(weights, dtype, name)

    def rows_of(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        return reference_rows(weight, ids, self.device)


def holds_reference(weight: Weight) -> bool:
    """Return whether the module already holds a weight with the reference's values and dtype, so that it need not be replaced."""
    values = weight.reference
    if not weight.info.castable and values.plain:
        return True
    held = not weight.differs or weight.stashed is not None
    return held and values.plain and values.dtype == reference_dtype(weight)


def reference_dtype(weight: Weight) -> torch.dtype:
    """Return the dtype of a weight in the reference: float64 if it is stored in float64, else float32."""
    return torch.float64 if weight.reference.dtype == torch.float64 else torch.float32


def reference_value(weight: Weight, device: torch.device) -> torch.Tensor:
    """Return a weight's values in the reference, in its `reference_dtype` and on `device`."""
    return weight.reference.read(device).to(reference_dtype(weight))


def reference_rows(weight: Weight, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return some rows of an embedding table [rows, width], with the reference's values: [*ids.shape, width]. ids: the indexes of
    the rows.
    """
    return weight.reference.rows(ids.to(device)).to(reference_dtype(weight))


def reference_name(model: LiveModel) -> str:
    """Return the name of the dtype in which the reference computes, for reports."""
    stored = {weight.reference.dtype for weight in model.weights.values() if weight.info.castable}
    return dtype_name(torch.float64 if torch.float64 in stored else torch.float32)
