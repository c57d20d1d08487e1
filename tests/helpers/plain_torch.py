"""What plain torch computes of a module whose tensors are cast by hand, written without any of the engine's code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dtype_engine.runtime.passes.outputs import main_output


class CastsByHand(TorchFunctionMode):
    """Plain torch, and where it raises the casts of the design: to the dtype of the parameters and buffers (or views of these)
    that the call has, else the promoted one; an operation in place to that of what it writes to.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self.acted = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        floats = [each for each in flat if isinstance(each, torch.Tensor) and each.is_floating_point()]
        try:
            return func(*args, **kwargs)
        except (RuntimeError, ValueError):
            if len({tensor.dtype for tensor in floats}) < 2:
                raise
        weights = [tensor for tensor in floats if id(tensor) in self.own or id(tensor._base) in self.own]
        target = functools.reduce(torch.promote_types, (tensor.dtype for tensor in weights or floats))
        if func.__name__.endswith("_") and (func.__name__ == "__setitem__" or not func.__name__.endswith("__")):
            target = args[0].dtype
        made = {id(tensor): tensor.to(target) for tensor in floats}  # a tensor that is given twice stays one tensor
        flat = [made.get(id(each), each) for each in flat]
        args, kwargs = torch.utils._pytree.tree_unflatten(flat, spec)
        self.acted = True
        return func(*args, **kwargs)


def by_hand(make: Callable[[], tuple[nn.Module, Any]], recipe: dict[str, str]) -> tuple[torch.Tensor, bool]:
    """Return the main output of the model with its tensors cast by hand, and whether casts had to be added."""
    module, inputs = make()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in recipe:
            tensor.data = tensor.data.to(getattr(torch, recipe[name]))
    adds = CastsByHand(module)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it is off for reference and candidate alike
    try:
        # `nn.RNNBase` compares dtypes in Python, and refuses no more than the function of torch that it calls.
        with torch.no_grad(), mock.patch.object(nn.RNNBase, "check_input", return_value=None), adds:
            output = main_output(module(**inputs) if isinstance(inputs, dict) else module(*inputs))[1]
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return output, adds.acted
