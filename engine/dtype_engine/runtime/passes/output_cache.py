"""Keeps the module outputs of a forward pass, so that a later pass does not repeat calls that can't have changed.

A cache lists the ended calls of a pass in order, with the outputs of watched modules. If a later recipe changes only weights that
were first used after the first n calls had ended, these n calls would return the same outputs. The later pass then returns the
stored outputs of the outermost of these calls, and does not call the modules inside them.

Outputs are stored by reference, not copied. If a tensor's version counter shows that the pass wrote to it later, the call is not
reused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Set
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from dtype_engine.runtime.libraries.torch_private import base_of, is_wrapped, version_of


@dataclass(slots=True)
class ModuleCall:
    """An ended call of a module."""

    module: str
    call: int
    """The number of the call among the calls of the module."""
    began_after: int
    """How many calls had ended when this call began."""
    ended_after: int
    """How many other calls had ended when this call ended."""
    output: Any
    observed: Any
    """What the observer returned when it received the output of this call."""
    versions: tuple[tuple[torch.Tensor, int], ...]

    @property
    def usable(self) -> bool:
        """Whether the output was kept, and nothing has written to its tensors."""
        return self.output is not _OPAQUE and all(version_of(tensor) == version for tensor, version in self.versions)


_OPAQUE = object()
"""Stands for an output that can't be reused, or was not kept."""


def _reusable(output: Any, weights: Container[int]) -> tuple[Any, tuple[tuple[torch.Tensor, int], ...]]:
    """Return a module's output for reuse, with its tensors and their versions. Return `_OPAQUE` instead if the output has other
    objects than tensors and plain values, such as a key-value cache, or one of these tensors:

    - a weight or a view of a weight, whose dtype may change the dtype of later operations;
    - a tensor with an autograd graph, or without a version counter;
    - a nested tensor, or a tensor that `torch.vmap` wraps.

    weights: the `id`s of the model's weights.
    """
    tensors: list[torch.Tensor] = []
    if not _tensors_of(output, tensors) or not all(_can_be_reused(tensor, weights) for tensor in tensors):
        return _OPAQUE, ()
    # In new containers, because models write to outputs of their submodules (CLIP adds the projected text).
    return _rebuilt(output, lambda tensor: tensor), tuple((tensor, version_of(tensor)) for tensor in tensors)


def _can_be_reused(tensor: torch.Tensor, weights: Container[int]) -> bool:
    return not (
        id(tensor) in weights
        or id(base_of(tensor)) in weights
        or tensor.requires_grad
        or version_of(tensor) < 0
        or tensor.is_nested
        or is_wrapped(tensor)
    )


@dataclass(slots=True)
class OutputCache:
    """The module outputs of one forward pass: records of its calls, in the order in which they ended.

    dtypes: the dtype of each weight in this pass, keyed by name. only: names of the modules whose outputs are kept; if None, those
    of all modules. names: the called module's name for each call, in order. first_use: how many calls had ended before a weight's
    first use, keyed by the weight's name. At most `budget` bytes of outputs are kept (`nbytes`, with each storage counted once). If
    a pass exceeds this limit, the cache becomes empty.
    """

    dtypes: Mapping[str, str]
    budget: int
    only: frozenset[str] | None = None
    first_use: Mapping[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    nbytes: int = 0
    _storages: set[int] = field(default_factory=set)

    def add(
        self, module: str, call: int, span: tuple[int, int], output: Any, observed: Any, weights: Container[int] = ()
    ) -> None:
        """Record an ended module call. call: its number among the calls of the module. span: how many calls had ended when this
        call began, and when this call ended. observed: what the observer returned for the output. weights: the `id`s of the model's
        weights. A call whose output is not kept can only be skipped together with a call that contains it.
        """
        if self.budget >= 0:
            kept = self.only is None or module in self.only
            reusable, versions = _reusable(output, weights) if kept else (_OPAQUE, ())
            self.append(ModuleCall(module, call, *span, reusable, observed, versions))

    def append(self, call: ModuleCall) -> None:
        """Append the record of an ended module call."""
        if self.budget < 0:
            return
        for tensor, _ in call.versions:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._storages:
                self._storages.add(storage.data_ptr())
                self.nbytes += storage.nbytes()
        self.calls.append(call)
        if self.nbytes > self.budget:
            self.budget = -1
            self.release()

    def release(self) -> None:
        """Release all outputs. The next pass can then use their memory, which is still in the CPU's cache."""
        self.calls.clear()
        self._storages.clear()
        self.nbytes = 0

    def within(self, index: int) -> list[ModuleCall]:
        """Return the calls that were made inside the call `calls[index]`, followed by that call itself."""
        began_after = self.calls[index].began_after
        first = bisect_left(self.calls, began_after, 0, index, key=lambda call: call.ended_after)
        return self.calls[first : index + 1]

    def reusable_calls(
        self, prefix: int, hooked: Set[str] = frozenset(), writers: Set[str] = frozenset()
    ) -> dict[tuple[str, int], int]:
        """Return which of the first `prefix` module calls can be skipped in the next pass: maps (module, number of its call) to the
        index of the call in `calls`, for example ("layers.0", 0) to 11. Calls inside a skipped call are not listed.

        A call can't be skipped if its output was not kept, if it is of one of the modules in `writers`, which change their
        arguments, or if it calls one of the modules in `hooked`, whose hooks must see the output. The calls inside such a call may
        be skipped.
        """
        before = [0]  # number of calls of hooked modules before each call
        for name in self.names[:prefix]:
            before.append(before[-1] + (name in hooked))
        indices: dict[tuple[str, int], int] = {}
        end = prefix
        for index in reversed(range(len(self.calls))):
            call = self.calls[index]
            if call.ended_after >= end or call.module in writers or not call.usable:
                continue
            if before[call.ended_after + 1] == before[call.began_after]:
                indices[call.module, call.call] = index
                end = call.began_after
        return indices


def clone_output(output: Any) -> Any:
    """Return a copy of a module's output, including its tensors, so that writes to the copy do not change the stored output."""
    return _rebuilt(output, torch.Tensor.clone)


def _rebuilt(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, dict):
        made = copy(output)  # the dict's own `copy` may lack arguments that its class requires
        for key, value in output.items():
            made[key] = _rebuilt(value, change)
        return made
    if type(output) in (tuple, list):
        return type(output)(_rebuilt(value, change) for value in output)
    return output


def _tensors_of(output: Any, tensors: list[torch.Tensor]) -> bool:
    """Append all tensors in a module's output to `tensors`. Returns False if it has anything else than tensors and plain values."""
    if isinstance(output, torch.Tensor):
        tensors.append(output)
        return True
    if isinstance(output, dict):
        return all(_tensors_of(value, tensors) for value in output.values())
    if type(output) in (tuple, list):
        return all(_tensors_of(value, tensors) for value in output)
    return output is None or isinstance(output, (bool, int, float, str))
