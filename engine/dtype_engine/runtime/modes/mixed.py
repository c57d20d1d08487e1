"""Runs a module whose weights are in any mix of dtypes, without changing the module.

PyTorch does not promote in matrix products: `Linear(float16)` on a float32 input raises. So the forward pass
runs under a `TorchFunctionMode` that sees every torch call, with four rules:

1. an operation that takes a weight (a parameter, a persistent buffer, or a view of one) computes in that
   weight's dtype; of several, the largest decides (`torch.promote_types`);
2. an operation without a weight whose float arguments differ computes in `torch.promote_types` of them;
3. an in-place operation keeps its destination's dtype;
4. a storage-only weight is dequantized to the activation's dtype, or, where there is none (an embedding
   look-up), to the compute dtype.

Wherever torch itself would have run an operation on a module in one dtype, the result is torch's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtype_engine.core import dtypes
from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.model.torch_private import base_of
from dtype_engine.runtime.modes.activations import ActivationRounding, Rounds
from dtype_engine.runtime.modes.op_tables import (
    EXPLICIT,
    REFUSES_MIXED,
    STRICT_IN_PLACE,
    Arguments,
    call_torch,
    is_in_place,
    promoted_dtype,
    recurrent_arguments,
    replace_tensors,
    takes_rows,
    tensors_in,
)
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.numerics.quantize import dequantize, dtype_name


@dataclass(frozen=True, slots=True)
class ImplicitCast:
    """One tensor that changed dtype on its way into an operation. `torch_raises`: plain torch would have refused.

    A storage dtype as `target`: it was rounded to that format, and is computed with in the dtype that it had.
    """

    module: str
    operation: str
    source: str
    target: str
    elements: int
    torch_raises: bool


class MixedDtypeMode(WeightMode):
    """The four rules, for the weights as they are now. It answers for the storage-only ones.

    Attributes:
        compute: the dtype of a storage-only weight that meets no activation.
        record: is called with every implicit cast, where given.
        rounding: rounds what meets a quantised weight, where given (the setting `quantize_activations`).
        autocast: the caller has `torch.autocast` on, whose own casts come first; the rules serve where torch would still refuse.
        operation: what torch is being called for under autocast; "" where the model itself names the dtype.
        acted: whether the rules have changed any argument so far.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        compute: torch.dtype,
        device: torch.device,
        record: Callable[[ImplicitCast], None] | None = None,
        autocast: bool = False,
        rounding: ActivationRounding | None = None,
    ) -> None:
        super().__init__(weights, device)
        self.compute = compute
        self.record = record
        self.rounding = rounding
        self.autocast = autocast
        self.operation = ""
        self.acted = False

    def weight_of(self, tensor: object) -> Weight | None:
        weight = self.weights.get(id(tensor))
        return weight if weight is not None and weight.scale is not None else None

    def dtype_of(self, weight: Weight) -> torch.dtype:
        return self.compute

    def value_of(self, weight: Weight) -> torch.Tensor:
        return _dequantized(weight, self.compute)

    def inputs_of(self, module: nn.Module, args: Arguments) -> Arguments:
        return args if self.autocast else recurrent_arguments(module, args, self.compute)

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(args, kwargs)
        # Most tensors are activations: this spares a call of `weight_of` for each of them.
        known = {id(tensor): weight for tensor in tensors if (weight := self.weights.get(id(tensor))) is not None}
        for key in known:
            self.note_use(key)
        stored = {key: weight for key, weight in known.items() if weight.scale is not None}
        if self.rounding is None:
            return self._run(func, name, tensors, stored, args, kwargs, None)
        formats = self.rounding.formats(tensors, {key: weight.dtype for key, weight in stored.items()})
        if not formats:
            return self._run(func, name, tensors, stored, args, kwargs, None)
        rounds = self.rounding.wanted(name, args, kwargs, formats)
        output = self._run(func, name, tensors, stored, args, kwargs, rounds)
        if name != "embedding":  # whose rows are activations
            self.rounding.follow(output, tensors, formats)
        return output

    def read_property(self, func: Any, args: Arguments) -> Any:
        if id(args[0]) in self.weights:
            self.note_use(id(args[0]))
        answer = super().read_property(func, args)
        if self.rounding is not None and isinstance(answer, torch.Tensor):
            weight = self.weight_of(args[0])
            stored = {} if weight is None else {id(args[0]): weight.dtype}
            self.rounding.follow(answer, [args[0]], self.rounding.formats([args[0]], stored))
        return answer

    def _run(
        self,
        func: Any,
        name: str,
        tensors: list[torch.Tensor],
        stored: Mapping[int, Weight],
        args: Arguments,
        kwargs: dict[str, Any],
        rounds: Rounds | None,
    ) -> Any:
        if name in EXPLICIT:
            if stored:
                values = {key: self.value_of(weight) for key, weight in stored.items()}
                args, kwargs = replace_tensors(args, kwargs, values)
            return func(*args, **kwargs)
        if stored and name == "embedding" and takes_rows(args, kwargs) and id(args[1]) in stored:
            self.acted = True
            return self._rows(args[0], stored[id(args[1])])
        target = self._target(name, tensors, stored, kwargs)
        if not self.autocast:
            return self._by_rules(func, name, tensors, stored, target, args, kwargs, rounds)
        values = {key: _dequantized(weight, target or self.compute) for key, weight in stored.items()}
        self.acted = self.acted or bool(values)
        self.operation = name if kwargs.get("dtype") is None else ""
        given, named = replace_tensors(args, kwargs, values)
        if rounds is not None:
            given, named = self._rounded(name, given, named, rounds)
        try:
            return func(*given, **named)
        except RuntimeError:  # autocast knows neither float64 nor recurrent layers on the CPU
            self.operation = ""
            with torch.autocast(self.device.type, enabled=False):
                return self._by_rules(func, name, tensors, stored, target, args, kwargs, rounds)
        finally:
            self.operation = ""

    def _by_rules(
        self,
        func: Any,
        name: str,
        tensors: list[torch.Tensor],
        stored: Mapping[int, Weight],
        target: torch.dtype | None,
        args: Arguments,
        kwargs: dict[str, Any],
        rounds: Rounds | None,
    ) -> Any:
        if target is None and not stored and rounds is None:
            return call_torch(func, name, args, kwargs, self)
        casts: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            if (weight := stored.get(id(tensor))) is not None:
                casts[id(tensor)] = _dequantized(weight, target or self.compute)
            elif target is not None and tensor.dtype != target and tensor.is_floating_point():
                if tensor.ndim == 0 and name not in REFUSES_MIXED:
                    continue  # torch lets a 0-d tensor follow the others
                casts[id(tensor)] = tensor.to(target)
                if self.record is not None:
                    self.record(implicit_cast(self.module, name, tensor, target, name in REFUSES_MIXED))
        self.acted = self.acted or bool(casts)
        args, kwargs = replace_tensors(args, kwargs, casts)
        if rounds is not None:
            args, kwargs = self._rounded(name, args, kwargs, rounds)
        return call_torch(func, name, args, kwargs, self)

    def _rounded(
        self, name: str, args: Arguments, kwargs: dict[str, Any], rounds: Rounds
    ) -> tuple[Arguments, dict[str, Any]]:
        """The arguments, with the operand that meets a quantised weight rounded; in what autocast computes in, under it."""
        assert self.rounding is not None
        self.acted = True
        dtype = torch.get_autocast_dtype(self.device.type) if self.autocast else None
        args, kwargs, before = self.rounding.apply(name, args, kwargs, rounds, dtype)
        if self.record is not None:
            self.record(ImplicitCast(self.module, name, dtype_name(before.dtype), rounds.dtype, before.numel(), False))
        return args, kwargs

    def _rows(self, ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        """What a look-up takes from a storage-only table [rows, width]: only the rows at `ids` are dequantized. [*ids, width]."""
        table, scale, index = weight.tensor, weight.scale, ids.reshape(-1)
        assert scale is not None
        rows = table.data.view(torch.uint8).index_select(0, index).view(table.dtype)
        blocks = dtypes.BY_NAME[weight.dtype].blocks
        if blocks is not None:
            scale = scale[index // blocks.rows]
            rows = dequantize(rows, scale, self.compute, dataclasses.replace(blocks, rows=1))
        else:
            rows = dequantize(rows, scale[index] if len(scale) == len(table) else scale, self.compute)
        return rows.view(*ids.shape, table.shape[1])

    def _target(
        self, name: str, tensors: list[torch.Tensor], stored: Mapping[int, Weight], kwargs: dict[str, Any]
    ) -> torch.dtype | None:
        """The dtype this operation computes in, or None where torch decides as it always does."""
        floats = [tensor for tensor in tensors if tensor.is_floating_point() and id(tensor) not in stored]
        if not floats:
            return None
        first = floats[0].dtype
        if not stored and all(tensor.dtype == first for tensor in floats):
            return None
        out = kwargs.get("out")
        if out is not None or is_in_place(name):
            if name not in STRICT_IN_PLACE and not stored:
                return None
            return out.dtype if isinstance(out, torch.Tensor) else tensors[0].dtype
        sized = [tensor for tensor in floats if tensor.ndim > 0] or floats  # 0-d tensors do not decide, as in torch
        return promoted_dtype([tensor for tensor in sized if self._is_weight(tensor)] or sized)

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight or a view of one."""
        return id(tensor) in self.weights or id(base_of(tensor)) in self.weights


def implicit_cast(
    module: str, operation: str, tensor: torch.Tensor, target: torch.dtype, torch_raises: bool
) -> ImplicitCast:
    """The record of a cast of `tensor` to `target`."""
    return ImplicitCast(module, operation, dtype_name(tensor.dtype), dtype_name(target), tensor.numel(), torch_raises)


def _dequantized(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    assert weight.scale is not None
    return dequantize(weight.tensor.data, weight.scale, dtype, dtypes.BY_NAME[weight.dtype].blocks)
