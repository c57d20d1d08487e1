"""The reference: the weights as stored, each widened to float32 as it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.modes.dispatch import (
    EXPLICIT,
    METADATA,
    TENSOR_PROPERTIES,
    Arguments,
    call_torch,
    is_in_place,
    promote_floats,
    replace_tensors,
    takes_rows,
    tensors_in,
)
from dtype_engine.runtime.numerics.quantize import dequantize


class ReferenceMode(TorchFunctionMode):
    """The reference: every weight as stored, widened as it is used; without a second copy of the model.

    A weight stored in float64 stays float64. Look-ups in an embedding widen only the rows they take.
    """

    def __init__(self, weights: Mapping[int, Weight], device: torch.device) -> None:
        super().__init__()
        self.weights = weights
        self.device = device
        self.module = ""
        self.finished = 0
        self.first_use: dict[int, int] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func.__name__
        if name == "__get__":
            weight = self._weight(args[0])
            if weight is None:
                return func(*args)
            if func.__self__ is torch.Tensor.dtype:
                return reference_dtype(weight)
            if func.__self__ in TENSOR_PROPERTIES:
                return func(self.value_of(weight), *args[1:])
            return func(*args)
        if name in METADATA or name == "__set__":
            return func(*args, **kwargs)
        if name == "is_floating_point" and self._weight(args[0]) is not None:
            return True
        if name == "embedding" and takes_rows(args, kwargs):
            weight = self._weight(args[1])
            if weight is not None and weight.stored_scale is None:
                rows = func(args[0], weight.original.to(self.device), *args[2:], **kwargs)
                return rows.to(reference_dtype(weight))
        tensors = tensors_in(args, kwargs)
        values = {
            id(tensor): self.value_of(weight) for tensor in tensors if (weight := self._weight(tensor)) is not None
        }
        if values:
            args, kwargs = replace_tensors(args, kwargs, values)
            tensors = tensors_in(args, kwargs)
        if name not in EXPLICIT and not is_in_place(name):
            floats = [tensor for tensor in tensors if tensor.is_floating_point()]
            if floats and any(tensor.dtype != floats[0].dtype for tensor in floats):
                args, kwargs = promote_floats(name, floats, args, kwargs)
        return call_torch(func, name, args, kwargs, self)

    def _weight(self, tensor: object) -> Weight | None:
        weight = self.weights.get(id(tensor))
        if weight is None or not (weight.info.castable or weight.stored_scale is not None):
            return None
        self.first_use.setdefault(id(tensor), self.finished)
        return weight

    def value_of(self, weight: Weight) -> torch.Tensor:
        if weight.stored_scale is not None:
            return dequantize(weight.original.to(self.device), weight.stored_scale, reference_dtype(weight))
        return weight.original.to(self.device, reference_dtype(weight))


class FirstUseRecorder(TorchFunctionMode):
    """Changes nothing: notes for every weight how many module calls had finished when it was first looked at."""

    def __init__(self, weights: Mapping[int, Weight]) -> None:
        super().__init__()
        self.weights = weights
        self.module = ""
        self.finished = 0
        self.first_use: dict[int, int] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in(args, kwargs):
            if id(tensor) in self.weights:
                self.first_use.setdefault(id(tensor), self.finished)
        return func(*args, **kwargs)


def reference_dtype(weight: Weight) -> torch.dtype:
    return torch.float64 if weight.original.dtype == torch.float64 else torch.float32
