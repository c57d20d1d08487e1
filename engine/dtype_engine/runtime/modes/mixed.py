"""Running a module whose weights are in any mix of dtypes, without changing the module.

PyTorch does not promote in matrix products: `Linear(float16)` on a float32 input raises. So the forward pass
runs under a `TorchFunctionMode` that sees every torch call, with four rules:

1. an operation that takes a weight (a parameter, a persistent buffer, or a view of one) computes in that
   weight's dtype; of several, the largest decides (`torch.promote_types`);
2. an operation without a weight whose float arguments differ computes in `torch.promote_types` of them;
3. an in-place operation keeps its destination's dtype;
4. a storage-only weight is brought back to the activation's dtype, or, where there is none (an embedding
   look-up), to the compute dtype.

Wherever torch itself would have run an operation on a module in one dtype, the result is torch's own.
The reference runs under `ReferenceMode`: the weights as stored, each widened to float32 as it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.modes.dispatch import (
    EXPLICIT,
    METADATA,
    REFUSES_MIXED,
    STRICT_IN_PLACE,
    TENSOR_PROPERTIES,
    Arguments,
    call_torch,
    is_in_place,
    replace_tensors,
    takes_rows,
    tensors_in,
)
from dtype_engine.runtime.numerics.quantize import dequantize, dtype_name


@dataclass(frozen=True, slots=True)
class ImplicitCast:
    """One tensor that changed dtype on its way into an operation. `torch_raises`: plain torch would have refused."""

    module: str
    operation: str
    source: str
    target: str
    elements: int
    torch_raises: bool


class MixedDtypeMode(TorchFunctionMode):
    """The four rules, for the weights as they are now.

    weights: by `id` of the tensor in the module. compute: where a storage-only weight meets no activation.
    device: named in errors. record: hears every implicit cast, where given. autocast: the caller has `torch.autocast` on,
    whose own casts come first; the rules serve where torch would still refuse. `module` is kept current by the caller's
    hooks, and `operation` is what torch is being called for.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        compute: torch.dtype,
        device: torch.device,
        record: Callable[[ImplicitCast], None] | None = None,
        autocast: bool = False,
    ) -> None:
        super().__init__()
        self.weights = weights
        self.compute = compute
        self.device = device
        self.record = record
        self.autocast = autocast
        self.module = ""
        self.operation = ""
        self.acted = False

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
            return self._property(func, args)
        if name in METADATA or name == "__set__":
            return func(*args, **kwargs)
        if name == "is_floating_point" and self._kept(args[0]) is not None:
            return True
        tensors = tensors_in(args, kwargs)
        stored = [tensor for tensor in tensors if self._kept(tensor) is not None]
        if name in EXPLICIT:
            if stored:
                args, kwargs = replace_tensors(
                    args, kwargs, {id(t): self._brought_back(t, self.compute) for t in stored}
                )
            return func(*args, **kwargs)
        if name == "embedding" and takes_rows(args, kwargs) and self._kept(args[1]) is not None:
            self.acted = True
            return self._rows(*args[:2])
        target = self._target(name, tensors, stored, kwargs)
        if self.autocast:
            back = {id(tensor): self._brought_back(tensor, target or self.compute) for tensor in stored}
            self.acted = self.acted or bool(back)
            self.operation = name if kwargs.get("dtype") is None else ""
            with_values, named = replace_tensors(args, kwargs, back)
            try:
                return func(*with_values, **named)
            except RuntimeError:  # autocast knows neither float64 nor recurrent layers on the CPU
                self.operation = ""
                with torch.autocast(self.device.type, enabled=False):
                    return self._by_rules(func, name, tensors, stored, target, args, kwargs)
            finally:
                self.operation = ""
        return self._by_rules(func, name, tensors, stored, target, args, kwargs)

    def _by_rules(
        self,
        func: Any,
        name: str,
        tensors: list[torch.Tensor],
        stored: list[torch.Tensor],
        target: torch.dtype | None,
        args: Arguments,
        kwargs: dict[str, Any],
    ) -> Any:
        if target is None and not stored:
            return call_torch(func, name, args, kwargs, self)
        casts: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            if self._kept(tensor) is not None:
                casts[id(tensor)] = self._brought_back(tensor, target or self.compute)
            elif target is not None and tensor.dtype != target and tensor.is_floating_point():
                if tensor.ndim == 0 and name not in REFUSES_MIXED:
                    continue  # torch lets a 0-d tensor follow the others
                casts[id(tensor)] = tensor.to(target)
                if self.record is not None:
                    self._note(name, tensor, target)
        self.acted = self.acted or bool(casts)
        return call_torch(func, name, *replace_tensors(args, kwargs, casts), self)

    def _kept(self, tensor: object) -> Weight | None:
        """The weight behind a tensor that is kept in a storage-only dtype, else None."""
        weight = self.weights.get(id(tensor))
        return weight if weight is not None and weight.scale is not None else None

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight or a view of one."""
        return id(tensor) in self.weights or (tensor._base is not None and id(tensor._base) in self.weights)

    def _brought_back(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weights[id(tensor)]
        assert weight.scale is not None
        return dequantize(tensor.data, weight.scale, dtype)

    def _rows(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """What a look-up takes from a storage-only table: only these rows are brought back, never all of it."""
        scale, at = self.weights[id(table)].scale, ids.reshape(-1)
        assert scale is not None
        rows = table.data.view(torch.uint8).index_select(0, at).view(table.dtype)
        rows = dequantize(rows, scale[at] if len(scale) == len(table) else scale, self.compute)
        return rows.view(*ids.shape, table.shape[1])

    def _target(
        self, name: str, tensors: list[torch.Tensor], stored: list[torch.Tensor], kwargs: dict[str, Any]
    ) -> torch.dtype | None:
        """The dtype this operation computes in, or None where torch decides as it always does."""
        floats = [tensor for tensor in tensors if tensor.is_floating_point() and self._kept(tensor) is None]
        if not floats:
            return None
        first = floats[0].dtype
        if not stored and all(tensor.dtype == first for tensor in floats):
            return None
        if kwargs.get("out") is not None or is_in_place(name):
            if name not in STRICT_IN_PLACE and not stored:
                return None
            destination = kwargs.get("out")
            return destination.dtype if isinstance(destination, torch.Tensor) else tensors[0].dtype
        sized = [tensor for tensor in floats if tensor.ndim > 0] or floats  # 0-d tensors have no say, as in torch
        deciding = [tensor for tensor in sized if self._is_weight(tensor)] or sized
        target = deciding[0].dtype
        for tensor in deciding[1:]:
            target = torch.promote_types(target, tensor.dtype)
        return target

    def _property(self, func: Any, args: Arguments) -> Any:
        """`weight.dtype` of a storage-only weight is the dtype it comes back in; `.T` and the like bring it back."""
        if self._kept(args[0]) is None:
            return func(*args)
        if func.__self__ is torch.Tensor.dtype:
            return self.compute
        if func.__self__ in TENSOR_PROPERTIES:
            return func(self._brought_back(args[0], self.compute), *args[1:])
        return func(*args)

    def _note(self, name: str, tensor: torch.Tensor, target: torch.dtype) -> None:
        assert self.record is not None
        self.record(
            ImplicitCast(
                self.module, name, dtype_name(tensor.dtype), dtype_name(target), tensor.numel(), name in REFUSES_MIXED
            )
        )
