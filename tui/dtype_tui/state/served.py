"""How the model is to be served: the KV caches and the activations for which the app shows the memory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from dtype_engine.core.kv_cache import KV_CACHE, KVCacheTensor
from dtype_engine.core.tree import Module, Tree
from dtype_engine.recipe.serving_memory import interpolated

if TYPE_CHECKING:
    from dtype_engine.results.serving_memory import ActivationMemory, ServingMemory

CacheNodes = dict[str, tuple[KVCacheTensor, ...]]
"""The cache tensors at or below each node of a KV cache, by the node's name."""


class Served(msgspec.Struct):
    context: int | None = None
    """The tokens in each sequence, or None for `default_context` of the model."""
    batch: int = 1
    """The number of sequences."""
    budget: int | None = None
    """The bytes in which weights, KV cache and activations together are to fit, or None."""
    peaks: tuple[ActivationMemory, ...] = ()
    """The memory of activations at several contexts, or () while it is unknown."""
    caches: CacheNodes = msgspec.field(default_factory=dict)
    """The cache tensors at or below each node of a KV cache, by the node's name."""
    known: tuple[object, ServingMemory] | None = None
    """(the values from which memory was computed last, this memory)."""

    def activations(self, context: int) -> ActivationMemory:
        """Return the memory of activations at `context` tokens, interpolated between the contexts in `peaks`."""
        known = {peak.context: peak.nbytes for peak in self.peaks}
        return dataclasses.replace(self.peaks[0], nbytes=max(0, round(interpolated(known, context))), context=context)


def add_cache_nodes(tree: Tree) -> CacheNodes:
    """Add the nodes of KV caches to a tree that lacks them, as modules without weights. Returns the cache tensors at or below each
    added node.
    """
    found: CacheNodes = {}
    for tensor in tree.kv_cache.tensors:
        attention = tree.modules.get(tensor.module)
        node = f"{tensor.module}.{KV_CACHE}"
        if (
            attention is None
            or tensor.name in found
            or (node in tree.modules and node not in found and _is_real(tree, node))
        ):
            continue
        _child(tree, _child(tree, attention, KV_CACHE), tensor.part)
        found[node] = (*found.get(node, ()), tensor)
        found[tensor.name] = (tensor,)
    return found


def _is_real(tree: Tree, node: str) -> bool:
    """Return whether a module is one of the model's own, and not one that `add_cache_nodes` made."""
    module = tree.modules[node]
    return module.class_name is not None or bool(module.tensors) or module.end > module.first


def _child(tree: Tree, parent: Module, label: str) -> Module:
    known = parent.children.get(label)
    if known is None:
        name = f"{parent.name}.{label}"
        known = parent.children[label] = tree.modules[name] = Module(name, first=parent.end, end=parent.end)
    return known
