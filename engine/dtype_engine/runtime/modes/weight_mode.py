"""What every mode of a forward pass shares: the weights it knows, and how a weight answers questions about itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.modes.op_tables import METADATA, TENSOR_PROPERTIES, Arguments


class WeightMode(TorchFunctionMode):
    """Sees every torch call of a forward pass, and may put other values in the place of a weight's.

    A subclass says which weights it answers for (`weight_of`), their dtype and values (`dtype_of`, `value_of`), and how all
    other calls run (`run`). Left as they are, nothing changes.

    Attributes:
        weights: by `id` of the tensor in the module.
        device: where the pass runs.
        module: the dotted name of the module that is running, kept current by whoever runs the pass.
        finished: how many module calls have finished, kept current in the same way.
        first_use: `finished` when a weight was first used, by `id` of its tensor.
    """

    def __init__(self, weights: Mapping[int, Weight], device: torch.device) -> None:
        super().__init__()
        self.weights = weights
        self.device = device
        self.module = ""
        self.finished = 0
        self.first_use: dict[int, int] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func.__name__
        if name == "__get__":
            return self.read_property(func, args)
        if name in METADATA or name == "__set__":
            for given in args:
                if id(given) in self.weights:
                    self.note_use(id(given))  # some tell the dtype
            return func(*args, **kwargs)
        if name == "is_floating_point" and self.weight_of(args[0]) is not None:
            return True
        return self.run(func, name, args, kwargs)

    def note_use(self, key: int) -> None:
        """The weight whose tensor has this `id` is used now, or a question about it is answered."""
        self.first_use.setdefault(key, self.finished)

    def read_property(self, func: Any, args: Arguments) -> Any:
        """`tensor.dtype`, `tensor.T` and the like: of a weight that this mode answers for, from `dtype_of` and `value_of`."""
        weight = self.weight_of(args[0])
        if weight is None:
            return func(*args)
        if func.__self__ is torch.Tensor.dtype:
            return self.dtype_of(weight)
        if func.__self__ in TENSOR_PROPERTIES:
            return func(self.value_of(weight), *args[1:])
        return func(*args)

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """Any call that is no question about a tensor; `name` is `func.__name__`."""
        return func(*args, **kwargs)

    def weight_of(self, tensor: object) -> Weight | None:
        """The weight behind a tensor of the module, where this mode answers for it."""
        return None

    def dtype_of(self, weight: Weight) -> torch.dtype:
        """The dtype that a weight has for the model's own code."""
        return weight.tensor.dtype

    def value_of(self, weight: Weight) -> torch.Tensor:
        """A weight's values in `dtype_of` it, on the device, in the weight's shape."""
        return weight.tensor.data

    def inputs_of(self, module: nn.Module, args: Arguments) -> Arguments:
        """The positional arguments for a module that compares dtypes in Python, before any torch call sees them."""
        return args
