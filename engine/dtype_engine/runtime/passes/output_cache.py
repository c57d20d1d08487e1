"""Unchanged prefixes are not run twice.

A cache has the modules of a pass's calls in the order in which they finished, and of those that were watched what they returned.
When a later recipe changes only weights that were first used after some calls had finished, those calls would return the very
same again: their stored outputs are returned instead, and only the outermost of them need to be called at all.

Outputs are kept by reference, not copied: a tensor's version counter tells whether something wrote to it later in the
pass, and such a call is not reused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Set
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from dtype_engine.runtime.model.torch_private import base_of, version_of


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: how many calls had finished when it began and before it finished, what it returned, and what the
    observer made of that.
    """

    module: str
    call: int
    began_after: int
    ended_after: int
    output: Any
    observed: Any
    versions: tuple[tuple[torch.Tensor, int], ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the output is made of tensors only, and still what it was."""
        return self.output is not _OPAQUE and all(version_of(tensor) == version for tensor, version in self.versions)


_OPAQUE = object()


def record_call(
    module: str, call: int, span: tuple[int, int], output: Any, observed: Any, weights: Container[int] = ()
) -> ModuleCall:
    """Note a call. span: how many had finished when it began and before it finished.

    What can't be reused: an output with anything but tensors and plain values in it (a cache, say), one of the `weights` (by `id`)
    or a view of it, whose dtype decides in which an operation computes, a tensor with a history of gradients, one without a count
    of what was written to it, and a nested one.
    """
    if isinstance(output, torch.Tensor):
        if not _can_be_reused(output, weights):
            return ModuleCall(module, call, *span, _OPAQUE, observed)
        return ModuleCall(module, call, *span, output, observed, ((output, version_of(output)),))
    tensors: list[torch.Tensor] = []
    if not _tensors_of(output, tensors) or not all(_can_be_reused(tensor, weights) for tensor in tensors):
        return ModuleCall(module, call, *span, _OPAQUE, observed)
    # Containers of its own: models write into the outputs of their parts (CLIP puts the projected text there).
    kept = _rebuilt(output, lambda tensor: tensor)
    return ModuleCall(module, call, *span, kept, observed, tuple((t, version_of(t)) for t in tensors))


def _can_be_reused(tensor: torch.Tensor, weights: Container[int]) -> bool:
    return not (
        id(tensor) in weights
        or id(base_of(tensor)) in weights
        or tensor.requires_grad
        or version_of(tensor) < 0
        or tensor.is_nested
    )


@dataclass(slots=True)
class OutputCache:
    """The outputs of one pass: the calls that were watched, in the order they finished, and the dtypes of the weights.

    only: the modules whose outputs it keeps, None for all. names: the modules of all calls of the pass, one after another.
    first_use: how many calls had finished when each weight was first used.

    Keeps at most `budget` bytes of outputs alive (`nbytes`, every storage once); a pass that has more leaves it empty.
    """

    dtypes: Mapping[str, str]
    budget: int
    only: frozenset[str] | None = None
    first_use: Mapping[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    nbytes: int = 0
    _storages: set[int] = field(default_factory=set)

    def add(self, call: ModuleCall) -> None:
        """Append a finished call."""
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

    def count(self, module: str, call: int, span: tuple[int, int], observed: Any) -> None:
        """Append a call without its output: one that it is in is reused, or it runs again. span: as for `record_call`."""
        if self.budget >= 0:
            self.calls.append(ModuleCall(module, call, *span, _OPAQUE, observed))

    def release(self) -> None:
        """Keep no outputs any more: where nothing of them is reused, the next pass has their memory while it is in a cache."""
        self.calls.clear()
        self._storages.clear()
        self.nbytes = 0

    def within(self, index: int) -> list[ModuleCall]:
        """The call at an index of `calls`, after those that finished inside it."""
        began_after = self.calls[index].began_after
        first = bisect_left(self.calls, began_after, 0, index, key=lambda call: call.ended_after)
        return self.calls[first : index + 1]

    def changed(self, dtypes: Mapping[str, str]) -> set[str]:
        """The weights that have another dtype among these."""
        return {name for name, dtype in dtypes.items() if self.dtypes[name] != dtype}

    def reusable_calls(
        self, prefix: int, hooked: Set[str] = frozenset(), writers: Set[str] = frozenset()
    ) -> dict[tuple[str, int], int]:
        """The outermost of the first `prefix` calls by (module, call): their indices in `calls`. A call that can't be reused runs,
        and those inside it are reused by themselves. So it is with one of a `hooked` module or that has calls of such in it: their
        hooks need their outputs, and may have changed them; and nothing inside a reused call is called at all. And with one of the
        `writers`, which change what they are given: what has such a call in it gave that itself, or is one of them."""
        before = [0]  # calls of hooked modules before each
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
    """An output with tensors of its own, so that what is written to them later does not reach the stored ones."""
    return _rebuilt(output, torch.Tensor.clone)


def _rebuilt(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An output in containers of its own, with `change` of every tensor in it."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, dict):
        made = copy(output)  # its own `copy` may call its class without what that asks for
        for key, value in output.items():
            made[key] = _rebuilt(value, change)
        return made
    if type(output) in (tuple, list):
        return type(output)(_rebuilt(value, change) for value in output)
    return output


def _tensors_of(output: Any, tensors: list[torch.Tensor]) -> bool:
    """Collect the tensors of an output; False when there is anything else in it than tensors and plain values."""
    if isinstance(output, torch.Tensor):
        tensors.append(output)
        return True
    if isinstance(output, dict):
        return all(_tensors_of(value, tensors) for value in output.values())
    if type(output) in (tuple, list):
        return all(_tensors_of(value, tensors) for value in output)
    return output is None or isinstance(output, (bool, int, float, str))
