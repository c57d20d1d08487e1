"""What of torch is used although its name begins with an underscore; checked with torch 2.9 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

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
    "own_tensors",
    "tensor_slots",
    "version_of",
]

WithoutModes = DisableTorchFunction
"""A context in which no `TorchFunctionMode` sees a call."""
TO_COPY = torch.ops.aten._to_copy.default
"""What every cast of a tensor ends in, for a `TorchDispatchMode`."""
# C functions: both are asked in the middle of a forward pass.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often something has written to a tensor, or to a view of it."""
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The tensor that a view is of."""


def forward_hook_ids(module: nn.Module) -> set[int]:
    """The ids of the handles of a module's forward hooks and pre-hooks, whoever registered them."""
    return {*module._forward_hooks, *module._forward_pre_hooks}


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Kind]]:
    """A module's own parameters, then its own buffers: the local name, the tensor, the kind. Those that are None are left out."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, "parameter"
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer, "non-persistent buffer" if name in module._non_persistent_buffers_set else "buffer"


def tensor_slots(module: nn.Module, name: str) -> dict[str, torch.Tensor | None]:
    """Where a module itself keeps its parameter or buffer `name`: setting it there asks for no matching class."""
    return module._parameters if name in module._parameters else module._buffers  # type: ignore[return-value]
