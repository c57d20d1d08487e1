"""Records what the reference run of a scan writes into KV caches. The scan follows rounding errors of these tensors to the output,
as it does for the results of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dtype_engine.core.kv_formats import SCANNED
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import tensor_bytes
from dtype_engine.recipe.serving_memory import DEFAULT_CONTEXT, cache_tensor_bytes
from dtype_engine.runtime.modes.kv_cache import CacheNames, CacheWatcher
from dtype_engine.runtime.numerics.kv_rounding import round_cache


@dataclass(slots=True)
class CacheWrite:
    """The keys or the values that one call of an attention module writes into a KV cache. It has those fields of `WeightOp` that
    the scan uses.
    """

    name: str
    keys: bool
    outputs: list[torch.Tensor]
    """A list with one tensor, the written keys or values: [batch, heads, tokens, width]."""
    gradients: list[list[tuple[int, torch.Tensor]]] = field(default_factory=lambda: [[]])

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.name,)

    def errors(self, names: Sequence[str], amax: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return a list with one tensor [formats, elements]: by how much each format changes what was written. names: formats such
        as `kv:fp8`. amax: the calibrated largest |value| of each head, by the name of the cache tensor.
        """
        states = self.outputs[0]
        forms = (name.removeprefix(SCANNED) for name in names)
        rows = [round_cache(states, form, self.keys, amax.get(self.name)) - states for form in forms]
        return [torch.stack(rows).flatten(1)]


@dataclass
class CacheRecorder(CacheWatcher):
    """Records the keys and values that a pass writes into KV caches, and passes their gradients to `on_gradient`."""

    names: CacheNames
    on_gradient: Callable[[Any, int, torch.Tensor], None]
    """A function that is called in backward passes as `on_gradient(write, 0, gradient)` for each `CacheWrite`. 0 is the index of
    its only output.
    """
    writes: list[CacheWrite] = field(default_factory=list)

    def written(self, module: str, part: int, states: torch.Tensor, finished: int) -> torch.Tensor:
        for name in self.names.get(module, ())[part : part + 1]:
            if states.requires_grad:
                states = states.view_as(states)  # a view, since one tensor may be written both as keys and as values
                write = CacheWrite(name, part == 0, [states.detach()])
                states.register_hook(partial(self.on_gradient, write, 0))  # type: ignore[no-untyped-call]
                self.writes.append(write)
        return states


def scored_bytes(tree: Tree, name: str, dtype: str) -> int:
    """Return the bytes of a weight in a dtype. For a tensor of a KV cache, return its bytes in a format such as `kv:fp8`, for one
    sequence of `DEFAULT_CONTEXT` tokens.
    """
    if name in tree.tensors:
        return tensor_bytes(tree.tensors[name], dtype)
    tensor = next(each for each in tree.kv_cache.tensors if each.name == name)
    return cache_tensor_bytes(tensor, dtype.removeprefix(SCANNED), DEFAULT_CONTEXT, 1)
