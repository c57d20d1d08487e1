"""Gives a tree nodes for KV caches: a node `kv_cache` below each attention module, with a node for each tensor of the cache."""

from __future__ import annotations

from dtype_engine.core.kv_cache import KV_CACHE, KVCacheTensor
from dtype_engine.core.tree import Module, Tree

CacheNodes = dict[str, tuple[KVCacheTensor, ...]]
"""The cache tensors at or below each node of a KV cache, by the node's name."""


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
