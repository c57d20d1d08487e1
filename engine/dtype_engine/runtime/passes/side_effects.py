"""Detects what module calls do besides returning an output. If a call is skipped, these effects would be missing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from dtype_engine.runtime.device import random_states
from dtype_engine.runtime.libraries.torch_private import WithoutModes, version_of

_DEPTH = 6
"""Maximum nesting depth at which arguments are inspected. A key-value cache may hold lists of layers with tuples of tensors."""
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
Found = list[tuple[Any, Any]]
"""Pairs (object, version). The version changes if the object does: it is a tensor's version counter or a container's length."""


class SideEffects:
    """Detects the side effects of module calls during one forward pass. Create it before the pass begins."""

    def __init__(self, device: torch.device) -> None:
        self.writers: set[str] = set()
        """Names of the modules that changed their arguments, by writing to a tensor or adding to a list or dict."""
        self._device = device
        self._given: list[tuple[Any, Any, Found]] = []
        self._drawn = random_states(device)

    def begin(self, args: Any, kwargs: Any) -> None:
        """Record the state of the arguments with which a module is called."""
        with WithoutModes():
            self._given.append((args, kwargs, _found_in((args, kwargs))))

    def finish(self, name: str, depth: int) -> None:
        """Record whether a module has changed its arguments. depth: the number of modules around it that still run."""
        del self._given[depth + 1 :]  # of calls inside it that ended with an exception
        args, kwargs, before = self._given.pop()
        if not _is_same(before, _found_in((args, kwargs))):
            self.writers.add(name)

    def drew_numbers(self) -> bool:
        """Return whether the forward pass drew random numbers, so that its outputs depend on more than the arguments."""
        return any(not torch.equal(*states) for states in zip(self._drawn, random_states(self._device), strict=True))


def _found_in(value: Any) -> Found:
    found: Found = []
    for each in value:
        _collect(each, found, set(), _DEPTH)
    return found


def _collect(value: Any, found: Found, seen: set[int], depth: int) -> None:
    """Append a pair (object, version) to `found` for `value` and for everything in it, including attributes of objects other than
    modules. seen: the `id`s of the objects that were visited. depth: how many levels of nesting to inspect.
    """
    if isinstance(value, torch.Tensor):
        found.append((value, version_of(value)))
        return
    if type(value) in _PLAIN:  # most values are plain, and the checks below take several times as long
        found.append((value, 0))
        return
    if isinstance(value, dict):
        inside: Collection[Any] = value.values()
    elif isinstance(value, (list, tuple, set)):
        inside = value
    elif isinstance(value, torch.Generator):
        found.append((value, bytes(value.get_state().tolist())))
        return
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
        inside = vars(value).values()
    else:
        found.append((value, 0))
        return
    if id(value) in seen or not depth:
        return
    seen.add(id(value))
    found.append((value, len(inside)))
    for each in inside:
        _collect(each, found, seen, depth - 1)


def _is_same(before: Found, after: Found) -> bool:
    return len(before) == len(after) and all(
        one is other and version == now for (one, version), (other, now) in zip(before, after, strict=True)
    )
