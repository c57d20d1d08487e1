"""What of torch is used although its name begins with an underscore; checked with torch 2.9 to 2.13."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
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
    "base_of",
    "forward_hook_ids",
    "is_called_as_module",
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


def forward_hook_ids(module: nn.Module) -> set[int]:
    """The ids of the handles of a module's forward hooks and pre-hooks, whoever registered them."""
    return {*module._forward_hooks, *module._forward_pre_hooks}


def is_called_as_module() -> bool:
    """Asked by a function in place of a module's `forward`: whether the module itself was called, rather than its `forward` by the
    model's own code, which no hook sees either.
    """
    return sys._getframe(2).f_globals is _OF_MODULES


_OF_MODULES = nn.Module.__call__.__globals__
"""The names of the file in which torch calls `forward`."""


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
