"""What a rule that is being typed would do, before it is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.recipe import Rule, select, tensor_bytes
from dtype_engine.recipe.fused_words import fused_words

if TYPE_CHECKING:
    from dtype_engine.core.tree import Tree

PREVIEW_S = 0.5
"""How long a pattern may take to match while it is typed."""


@dataclass(frozen=True)
class Preview:
    """What a rule would take, and the bytes of that before and after.

    fused: what it does to the weights that runtimes fuse with those it takes.
    """

    modules: frozenset[str]
    tensors: frozenset[str]
    elements: int
    bytes_before: int
    bytes_after: int
    uncastable_count: int
    fused: str = ""


def preview(tree: Tree, planned: Mapping[str, str], rule: Rule) -> Preview:
    """What a rule would do to tensors whose planned dtypes are these.

    Raises PatternError for a pattern that takes too long to match: it may not hold up the keys.
    """
    taken = select(tree, rule.pattern, PREVIEW_S)
    names = frozenset(taken.tensors)
    tensors = [tree.tensors[name] for name in taken.tensors]
    return Preview(
        taken.modules,
        names,
        sum(tensor.numel for tensor in tensors),
        sum(tensor_bytes(tensor, planned[tensor.name]) for tensor in tensors),
        sum(tensor_bytes(tensor, rule.dtype) for tensor in tensors),
        taken.uncastable_count,
        fused_words(rule.dtype, names, planned, tree.fused_groups),
    )
