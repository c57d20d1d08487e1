"""Finds the companions of a weight. If an operation uses several weights, the companions of the smallest one are the others. For
example, the companion of a bias is the matrix of its layer.

An operation on float32 activations computes in 16 bits only if all its weights are in the same 16-bit dtype; otherwise, all
values are promoted to float32. This common effect is counted once: in a compute dtype such as bfloat16, the score of the
smallest weight is the drift with all weights of the operation cast, minus the drift with only the companions cast. The scores of
the weights then add up to the drift of the whole operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dtype_engine.runtime.libraries.torch_private import base_of
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.op_tables import Arguments, tensors_in
from dtype_engine.runtime.modes.weight_mode import WeightMode


def companions_of(operation: Sequence[str], weights: Mapping[str, Weight]) -> tuple[str, tuple[str, ...]]:
    """Return (the smallest weight of an operation, the names of its other weights that can be cast). If several weights are equally
    small, the last one is returned. operation: the names of the operation's weights.
    """
    smallest = min(reversed(operation), key=lambda name: weights[name].info.numel)
    return smallest, tuple(name for name in operation if name != smallest and weights[name].info.castable)


def added_drift(drift_of: Callable[[tuple[str, ...]], float], name: str, companions: tuple[str, ...]) -> float:
    """Return by how much casting the weight `name` increases the drift if its companions are cast, too. If the drift with only
    the companions cast is infinite, return the drift with only this weight cast.

    drift_of: returns the drift with only the named weights cast.
    """
    before = drift_of(companions)
    return max(0.0, drift_of((*companions, name)) - before) if math.isfinite(before) else drift_of((name,))


class CompanionsMode(TorchFunctionMode):
    """Observes which weights are used together in one operation. `found` maps the smallest of them to the others, its companions.

    mode: the WeightMode that runs the pass. It must be entered after the CompanionsMode, which then sees the operations of the
    pass.
    """

    def __init__(self, found: dict[str, tuple[str, ...]], mode: WeightMode) -> None:
        super().__init__()
        self.found = found
        self.mode = mode
        self._by_name = {weight.info.name: weight for weight in mode.weights.values()}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        used = [self._weight_of(tensor) for tensor in tensors_in(args, kwargs or {})]
        names = tuple(dict.fromkeys(weight.info.name for weight in used if weight is not None and weight.info.castable))
        if len(names) > 1:
            self.found.setdefault(*companions_of(names, self._by_name))
        return func(*args, **(kwargs or {}))

    def _weight_of(self, tensor: torch.Tensor) -> Weight | None:
        """Return a weight if the tensor is this weight, a view of it, or its replacement in this pass, otherwise None."""
        base = base_of(tensor)
        owner = tensor if base is None else base
        return self.mode.weights.get(self.mode.standing_for.get(owner, id(owner)))
