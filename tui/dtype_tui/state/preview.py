"""Previews the effect of a rule while the user types it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.recipe import Rule, select, tensor_bytes, uncast_words
from dtype_engine.recipe.fused_words import fused_words

if TYPE_CHECKING:
    from dtype_engine.core.tree import Tree

PREVIEW_S = 0.5
"""Time limit in seconds for matching a pattern that the user is typing."""


@dataclass(frozen=True)
class Preview:
    """What a rule would do: the tensors that it would match and cast, and the change in bytes."""

    modules: frozenset[str]
    """Names of the modules that the pattern matches."""
    tensors: frozenset[str]
    """Names of the tensors that the rule would cast."""
    elements: int
    bytes_before: int
    """Bytes of the tensors in `tensors` under the current recipe."""
    bytes_after: int
    uncastable_count: int
    """Number of matching tensors that the rule does not cast."""
    uncastable: str
    """The name of the first tensor that matches but is not cast, and the reason, as text. "" if there is no such tensor."""
    fused: str = ""
    """What happens to other weights if the rule casts only some of the weights that a runtime fuses into one, as text: for example,
    `k_proj, v_proj: new scale`. "" if nothing happens to them.
    """


def preview(tree: Tree, planned: Mapping[str, str], rule: Rule) -> Preview:
    """Return what a rule would do. planned: the dtype of each tensor under the current recipe, by name.

    Raises PatternError, also for a pattern that takes longer than `PREVIEW_S` to match, because keys wait for the preview.
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
        len(taken.uncastable),
        uncast_words(tree, taken) if taken.uncastable else "",
        fused_words(rule.dtype, names, planned, tree.fused_groups),
    )
