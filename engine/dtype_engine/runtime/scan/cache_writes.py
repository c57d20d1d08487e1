"""Records what the reference run of a scan writes into KV caches, whose rounding errors are followed to the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dtype_engine.core.kv_formats import KV_FORMATS, SCANNED
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import tensor_bytes
from dtype_engine.recipe.serving_memory import DEFAULT_CONTEXT, cache_tensor_bytes
from dtype_engine.runtime.modes.kv_cache import CacheNames, CacheWatcher
from dtype_engine.runtime.numerics.kv_rounding import round_cache, round_queries


@dataclass(slots=True)
class CacheWrite:
    """The keys or the values that one call of an attention module writes into a KV cache. With keys, also the queries that meet
    them, if a scanned format rounds queries. `outputs` and `gradients` are as in `WeightOp`.
    """

    name: str
    keys: bool
    outputs: list[torch.Tensor]
    """Tensors [batch, heads, tokens, width]: what is written and, for keys, the queries of each attention that reads them."""
    gradients: list[list[tuple[int, torch.Tensor]]] = field(default_factory=lambda: [[]])

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.name,)

    def errors(self, names: Sequence[str], amax: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the changes that rounding to each format in `names`, such as `kv:fp8`, makes to `outputs`: a list with one tensor
        [formats, elements] for each. amax: the calibrated largest |value| of each head, by the name of the cache tensor.
        """
        states, *queries = self.outputs
        forms = [KV_FORMATS[name.removeprefix(SCANNED)] for name in names]
        errors = [
            [round_cache(states, form.name, self.keys, amax.get(self.name)) - states for form in forms],
            *(
                [round_queries(each) - each if form.queries else torch.zeros_like(each) for form in forms]
                for each in queries
            ),
        ]
        return [torch.stack(rows).flatten(1) for rows in errors]


@dataclass
class CacheRecorder(CacheWatcher):
    """Records the keys and values that a pass writes into KV caches, and the queries."""

    names: CacheNames
    on_gradient: Callable[[Any, int, torch.Tensor], None]
    """Called in backward passes as `on_gradient(write, index, gradient)` for each tensor of `CacheWrite.outputs`."""
    keys_read: Mapping[str, str] = field(default_factory=dict)
    """The names of the cache tensors with the keys that attention modules read, keyed by the module."""
    takes_queries: bool = False
    """Whether to record queries, too, because a scanned format rounds them."""
    writes: list[CacheWrite] = field(default_factory=list)

    def written(self, module: str, part: int, states: torch.Tensor, finished: int) -> torch.Tensor:
        for name in self.names.get(module, ())[part : part + 1]:
            if states.requires_grad:
                states = states.view_as(states)  # a view, since one tensor may be written both as keys and as values
                write = CacheWrite(name, part == 0, [states.detach()])
                states.register_hook(partial(self.on_gradient, write, 0))  # type: ignore[no-untyped-call]
                self.writes.append(write)
        return states

    def asked(self, module: str, queries: torch.Tensor) -> torch.Tensor:
        keys = self.keys_read.get(module)
        write = next((write for write in reversed(self.writes) if write.name == keys), None)
        if write is not None and queries.requires_grad:
            queries = queries.view_as(queries)
            write.outputs.append(queries.detach())
            write.gradients.append([])
            queries.register_hook(partial(self.on_gradient, write, len(write.outputs) - 1))  # type: ignore[no-untyped-call]
        return queries

    @property
    def unseen(self) -> list[str]:
        return (
            [write.name for write in self.writes if write.keys and len(write.outputs) == 1]
            if self.takes_queries
            else []
        )


def scored_bytes(tree: Tree, name: str, dtype: str) -> int:
    """Return the bytes of a weight, or of a KV cache of `DEFAULT_CONTEXT` tokens. dtype: for a cache, a format such as `kv:fp8`."""
    if name in tree.tensors:
        return tensor_bytes(tree.tensors[name], dtype)
    tensor = next(each for each in tree.kv_cache.tensors if each.name == name)
    return cache_tensor_bytes(tensor, dtype.removeprefix(SCANNED), DEFAULT_CONTEXT, 1)
