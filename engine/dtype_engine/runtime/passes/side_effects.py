"""What the calls of a pass do apart from returning their outputs, which reusing an output would leave out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from dtype_engine.runtime.model.torch_private import WithoutModes, version_of

_DEPTH = 6
"""How far containers and objects are looked into: a cache, its list of layers, a layer, its tuple, a tensor."""
Found = list[tuple[Any, Any]]
"""Objects, and what tells whether one was written to: a tensor's version, a container's length."""


class SideEffects:
    """Watches one pass, from before it begins.

    Attributes:
        writers: the modules that changed something they were given: wrote to a tensor, or put one into a list or a dict.
    """

    def __init__(self, device: torch.device) -> None:
        self.writers: set[str] = set()
        self._device = device
        self._given: list[tuple[Any, Any, Found]] = []
        self._drawn = self._generators()

    def begin(self, args: Any, kwargs: Any) -> None:
        """A module is called with these."""
        with WithoutModes():
            self._given.append((args, kwargs, _found_in((args, kwargs))))

    def finish(self, name: str, depth: int) -> None:
        """A module has returned, called from within `depth` others. Calls within it that raised never did."""
        del self._given[depth + 1 :]
        args, kwargs, before = self._given.pop()
        if not _is_same(before, _found_in((args, kwargs))):
            self.writers.add(name)

    def drew_numbers(self) -> bool:
        """The pass is over: whether random numbers were drawn, so that calls depended on more than they were given."""
        return any(not torch.equal(*states) for states in zip(self._drawn, self._generators(), strict=True))

    def _generators(self) -> list[torch.Tensor]:
        states = [torch.default_generator.get_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states


def _found_in(value: Any) -> Found:
    found: Found = []
    for each in value:
        _collect(each, found, set(), _DEPTH)
    return found


def _collect(value: Any, found: Found, seen: set[int], depth: int) -> None:
    """Add what is in `value`, itself included; attributes of objects are looked into, of modules and classes none."""
    if isinstance(value, torch.Tensor):
        found.append((value, version_of(value)))
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
