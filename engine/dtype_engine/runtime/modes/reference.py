"""The reference: the weights as stored, each widened to float32 as it is used, without a second copy of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward
from dtype_engine.runtime.model.live import LiveModel, Weight
from dtype_engine.runtime.modes.op_tables import (
    EXPLICIT,
    Arguments,
    call_torch,
    is_in_place,
    promote_floats,
    replace_tensors,
    takes_rows,
    tensors_in,
)
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.modes.widening_buffer import WidenedWeights
from dtype_engine.runtime.numerics.quantize import dequantize, dtype_name

_KEEPS_NO_ARGUMENT = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Operations whose result is no view of a weight."""


class ReferenceMode(WeightMode):
    """Every weight as stored, widened as it is used. It answers for all weights that can be cast or have scales.

    A weight stored in float64 stays float64. Look-ups in an embedding widen only the rows they take.

    widened: the memory for large weights, used where that is safe: on a CPU, without gradients. Not for passes in which another
    mode keeps what it sees. None: new memory for each.
    """

    def __init__(
        self, weights: Mapping[int, Weight], device: torch.device, widened: WidenedWeights | None = None
    ) -> None:
        super().__init__(weights, device)
        self.widened = widened if device.type == "cpu" else None

    def weight_of(self, tensor: object) -> Weight | None:
        weight = self.weights.get(id(tensor))
        if weight is None or not (weight.info.castable or weight.stored_scale is not None):
            return None
        self.note_use(id(tensor))
        return weight

    def dtype_of(self, weight: Weight) -> torch.dtype:
        return reference_dtype(weight)

    def value_of(self, weight: Weight) -> torch.Tensor:
        return reference_value(weight, self.device)

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        if name == "embedding" and takes_rows(args, kwargs):
            weight = self.weight_of(args[1])
            if weight is not None and weight.stored_scale is None:
                rows = func(args[0], weight.original.to(self.device), *args[2:], **kwargs)
                return rows.to(reference_dtype(weight))
        tensors = tensors_in(args, kwargs)
        found = {
            id(tensor): weight
            for tensor in tensors
            if id(tensor) in self.weights and (weight := self.weight_of(tensor)) is not None
        }
        if is_in_place(name) and (written := found.get(id(args[0]))) is not None:
            _refuse_if_widened(written)
        if self.widened is not None and name in _KEEPS_NO_ARGUMENT and not torch.is_grad_enabled():
            widened = self.widened.values(found.values(), self.value_of)
        else:
            widened = [self.value_of(weight) for weight in found.values()]
        values = dict(zip(found, widened, strict=True))
        if values:
            args, kwargs = replace_tensors(args, kwargs, values)
            tensors = tensors_in(args, kwargs)
        if name not in EXPLICIT and not is_in_place(name):
            floats = [tensor for tensor in tensors if tensor.is_floating_point()]
            if floats and any(tensor.dtype != floats[0].dtype for tensor in floats):
                args, kwargs = promote_floats(name, floats, args, kwargs)
        return call_torch(func, name, args, kwargs, self)


def _refuse_if_widened(weight: Weight) -> None:
    """What is written to a widened copy would be lost. Raises NoForward."""
    if weight.stored_scale is not None or weight.original.dtype != reference_dtype(weight):
        raise NoForward(
            f"the model writes to {weight.info.name} while it runs; the reference can't keep that where it is stored in "
            f"{weight.info.dtype}: store it in float32"
        )


class FirstUseRecorder(WeightMode):
    """Changes nothing: notes the first use of every weight, questions about it included."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in(args, kwargs):
            if id(tensor) in self.weights:
                self.note_use(id(tensor))
        return func(*args, **kwargs)


def reference_dtype(weight: Weight) -> torch.dtype:
    """The dtype that the reference has a weight in: float64 where it is stored so, else float32."""
    return torch.float64 if weight.original.dtype == torch.float64 else torch.float32


def reference_value(weight: Weight, device: torch.device) -> torch.Tensor:
    """A weight's stored values in `reference_dtype` of it, on `device`, in the stored shape."""
    stored, dtype = weight.original, reference_dtype(weight)
    if weight.stored_scale is not None:
        return dequantize(stored.to(device), weight.stored_scale, dtype, dtypes.BY_NAME[weight.info.dtype].blocks)
    return stored.to(device, dtype)


def reference_name(model: LiveModel) -> str:
    """The name of the dtype that the reference computes in, for the report."""
    stored = {weight.original.dtype for weight in model.weights.values() if weight.info.castable}
    return dtype_name(torch.float64 if torch.float64 in stored else torch.float32)
