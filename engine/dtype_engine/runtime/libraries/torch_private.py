"""Uses private names of torch. No other file does. Tested with torch 2.10 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from operator import attrgetter
from threading import Lock
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary as WeakIdKeyDictionary

from dtype_engine.core.replaced import replaced
from dtype_engine.core.tree import Kind

WithoutModes = DisableTorchFunction
"""A context manager. During its `with` block, no `TorchFunctionMode` intercepts calls of torch functions."""
SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
"""The softmax of attention that torch computes without a fused kernel. To a `TorchDispatchMode` it is one operation."""
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
"""The matrix products of experts with the tokens that each of them receives."""
TO_COPY = torch.ops.aten._to_copy.default
"""The operation that a `TorchDispatchMode` receives for every cast of a tensor."""
# attrgetter is a C function, which matters since this is called during a forward pass.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""Returns the tensor of which the argument is a view, or None if the argument is not a view."""

is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Returns whether a tensor is a wrapper without memory, which a running transform such as `torch.vmap` made."""


def unwrapped(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]:
    """Return (the tensor inside the wrappers that transforms put around `tensor`, a function that wraps any other tensor in the
    same way). The function is None if any wrapper is not from `torch.vmap`, but for example from `torch.func.grad`.
    """
    functorch, batches = torch._C._functorch, list[tuple[int, int]]()
    only_batched = True
    while is_wrapped(tensor):
        only_batched &= functorch.is_batchedtensor(tensor)
        batches.append((functorch.maybe_get_bdim(tensor), functorch.maybe_get_level(tensor)))
        tensor = functorch.get_unwrapped(tensor)

    def wrap(inner: torch.Tensor) -> torch.Tensor:
        for dim, level in reversed(batches):
            inner = functorch._add_batch_dim(inner, dim, level)
        return inner

    return tensor, wrap if only_batched else None


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's memory until the memory is freed."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """Return torch's version counter, which increases with each write to a tensor or its views, or -1 for a tensor that was created
    under `torch.inference_mode` and has no counter.
    """
    try:
        return tensor._version
    except RuntimeError:
        return -1


def has_forward_hooks(module: nn.Module, except_for: type) -> bool:
    """Return whether a module has forward hooks or forward pre-hooks that are no instances of `except_for`."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not isinstance(hook, except_for) for hook in hooks)


as_called: Callable[..., Any] = nn.Module._call_impl
"""torch's implementation of a module call, which runs hooks and `forward`. Its first argument is the module."""
_COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which `Module.compile` stores a function, which torch then calls instead of `as_called`."""


def call_instead(module: nn.Module, function: Callable[..., Any]) -> Callable[[], None]:
    """Redirect calls of a module, but not of its copies, to `function`, which gets the module as its first argument. Returns a
    function that undoes this.
    """
    before = module.__dict__.get(_COMPILED_CALL)
    bound = module.__dict__[_COMPILED_CALL] = MethodType(function, module)

    def undo() -> None:
        if module.__dict__.get(_COMPILED_CALL) is not bound:
            return
        if before is None:
            del module.__dict__[_COMPILED_CALL]
        else:
            module.__dict__[_COMPILED_CALL] = before

    return undo


class _WithoutDtypeCheck:
    """A context manager that disables a check in `nn.RNN`, `nn.LSTM` and `nn.GRU`, namely that the input has the dtype of the
    first weight. They check this in Python before they call torch, which itself raises an error for dtypes that it can't combine.
    """

    def __init__(self) -> None:
        self._lock, self._blocks, self._undo = Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:  # the blocks of several threads may overlap
            if not self._blocks:
                self._undo.enter_context(replaced(nn.RNNBase, "check_input", _checks_all_but_dtypes()))
            self._blocks += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._undo.close()


def _checks_all_but_dtypes() -> Callable[[nn.RNNBase, torch.Tensor, torch.Tensor | None], None]:
    by_torch = nn.RNNBase.check_input

    def check_input(module: nn.RNNBase, values: torch.Tensor, batch_sizes: torch.Tensor | None) -> None:
        with WithoutModes():
            first = module._flat_weights[0].dtype  # type: ignore[union-attr]
            if values.dtype != first:
                values = torch.empty(values.shape, dtype=first, device="meta")
            by_torch(module, values, batch_sizes)

    return check_input


without_dtype_check = _WithoutDtypeCheck()


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is the result of `torch.compile`, or was compiled by `Module.compile`."""
    return "_orig_mod" in module._modules or module.__dict__.get(_COMPILED_CALL) is not None


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Kind]]:
    """Yield (local name, tensor, kind) for the parameters and then the buffers of a module, without those of its submodules."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, "parameter"
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer, "non-persistent buffer" if name in module._non_persistent_buffers_set else "buffer"


def slots_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the two dictionaries in which a module holds its own parameters and its own buffers, keyed by local name."""
    return module._parameters, module._buffers


def tensor_slots(module: nn.Module, name: str) -> dict[str, torch.Tensor | None]:
    """Return the dictionary in which a module holds its parameter or buffer `name`. An entry can be replaced by any other tensor,
    because torch checks types only when an attribute is assigned.
    """
    return module._parameters if name in module._parameters else module._buffers  # type: ignore[return-value]
