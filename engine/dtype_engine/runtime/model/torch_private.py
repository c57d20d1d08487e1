"""What of torch is used although its name begins with an underscore; checked with torch 2.9 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from dtype_engine.core.tree import Kind

__all__ = [
    "TO_COPY",
    "TorchDispatchMode",
    "WeakIdKeyDictionary",
    "WithoutModes",
    "as_called",
    "base_of",
    "call_instead",
    "has_forward_hooks",
    "is_compiled",
    "own_tensors",
    "slots_of",
    "tensor_slots",
    "version_of",
]

WithoutModes = DisableTorchFunction
"""A context in which no `TorchFunctionMode` sees a call."""
TO_COPY = torch.ops.aten._to_copy.default
"""What every cast of a tensor ends in, for a `TorchDispatchMode`."""
# A C function: it is asked in the middle of a forward pass.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The tensor that a view is of."""


def version_of(tensor: torch.Tensor) -> int:
    """How often something has written to a tensor, or to a view of it; -1 for one made under `torch.inference_mode`, where nobody
    counts.
    """
    try:
        return tensor._version
    except RuntimeError:
        return -1


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether anybody registered forward hooks or pre-hooks of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


as_called: Callable[..., Any] = nn.Module._call_impl
"""Calls a module, the first argument, as torch does: with its hooks."""
_INSTEAD = "_compiled_call_impl"
"""The attribute that torch calls, where it is set, in place of `as_called`: `Module.compile` keeps there what it made."""


def call_instead(module: nn.Module, function: Callable[..., Any]) -> Callable[[], None]:
    """Have calls of a module call `function`, with the module before their arguments, until what is returned is called. A copy of
    the module has no such function.
    """
    before = module.__dict__.get(_INSTEAD)
    bound = module.__dict__[_INSTEAD] = MethodType(function, module)

    def undo() -> None:
        if module.__dict__.get(_INSTEAD) is not bound:
            return
        if before is None:
            del module.__dict__[_INSTEAD]
        else:
            module.__dict__[_INSTEAD] = before

    return undo


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made this of a module, or `Module.compile` has compiled it."""
    return "_orig_mod" in module._modules or module.__dict__.get(_INSTEAD) is not None


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Kind]]:
    """A module's own parameters, then its own buffers: the local name, the tensor, the kind. Those that are None are left out."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, "parameter"
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer, "non-persistent buffer" if name in module._non_persistent_buffers_set else "buffer"


def slots_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module keeps its parameters, and its buffers."""
    return module._parameters, module._buffers


def tensor_slots(module: nn.Module, name: str) -> dict[str, torch.Tensor | None]:
    """Where a module itself keeps its parameter or buffer `name`: setting it there asks for no matching class."""
    return module._parameters if name in module._parameters else module._buffers  # type: ignore[return-value]
