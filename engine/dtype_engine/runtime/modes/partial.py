"""The reference, with the weighted operations of some modules run as cast: their own error, without anything that others add."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.model.torch_private import base_of
from dtype_engine.runtime.modes.activations import ActivationRounding
from dtype_engine.runtime.modes.mixed import MixedDtypeMode
from dtype_engine.runtime.modes.op_tables import EXPLICIT, METADATA, Arguments, tensors_in
from dtype_engine.runtime.modes.reference import ReferenceMode


class PartialCastMode(ReferenceMode):
    """A weighted operation in a module that `inside` takes (by its dotted name) runs on the weights as they are cast now, by the
    four rules of `MixedDtypeMode`; any other on the weights as stored, widened. Operations without a weight follow the rules.

    Attributes:
        drifting: the weights (by `id`) whose dtype is not the reference's.
        uses: how many module calls had finished before a module's first weighted operation on one of these, by module.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        device: torch.device,
        compute: torch.dtype,
        drifting: frozenset[int],
        inside: Callable[[str], bool],
        rounding: ActivationRounding | None = None,
    ) -> None:
        super().__init__(weights, device)
        self.rules = MixedDtypeMode(weights, compute, device, rounding=rounding)
        self.drifting = drifting
        self.inside = inside
        self.uses: dict[str, int] = {}

    def inputs_of(self, module: nn.Module, args: Arguments) -> Arguments:
        return self.rules.inputs_of(module, args)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name: str = func.__name__
        known = [key for tensor in tensors_in(args, kwargs or {}) if (key := self._known(tensor)) is not None]
        computes = name == "__matmul__" or not (name in METADATA or name in EXPLICIT or name.startswith("__"))
        if computes and any(key in self.drifting for key in known):
            self.uses.setdefault(self.module, self.finished)
        self.rules.module = self.module
        if not known or self.inside(self.module):
            return self.rules.__torch_function__(func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _known(self, tensor: torch.Tensor) -> int | None:
        """The `id` of the weight that a tensor is, or is a view of."""
        if id(tensor) in self.weights:
            return id(tensor)
        base = id(base_of(tensor))
        return base if base in self.weights else None
