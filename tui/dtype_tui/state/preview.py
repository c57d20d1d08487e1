"""Previews the effect of a rule while the user types it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Plan, Rule, dtype_given, select, tensor_bytes, uncast_words
from dtype_engine.recipe.fused_words import fused_words

if TYPE_CHECKING:
    from dtype_engine.core.tree import Module, TensorInfo, Tree
    from dtype_tui.state.experiment import Experiment

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
    """Bytes of `tensors` under the current recipe."""
    bytes_after: int
    uncastable_count: int
    """Number of matching tensors that the rule does not cast."""
    uncastable: str
    """The first matching tensor that the rule does not cast, and the reason, as text, or ""."""
    overrides: str = ""
    """The rules that the typed rule would override, such as `6 tensors of rule 1`, or ""."""
    fused: str = ""
    """What happens to other weights that inference runtimes fuse with the cast ones, such as `k_proj, v_proj: new scale`, or ""."""
    caches: frozenset[str] = frozenset()
    """Names of the tensors of KV caches that the rule would give a format."""
    counts: tuple[int, ...] = ()
    """`counts[n]`: how many of the first n tensors of `Tree.order` the rule would cast."""

    def count_below(self, module: Module) -> int:
        """Return how many tensors at or below a module the rule would cast."""
        return self.counts[module.end] - self.counts[module.first]


def preview(tree: Tree, plan: Plan, rule: Rule) -> Preview:
    """Return what a rule would do if it were added to the recipe of `plan`. Raises PatternError if the pattern is invalid, or
    takes longer than `PREVIEW_S` to match, because keys wait for the preview.
    """
    taken = select(tree, rule.pattern, PREVIEW_S).for_dtype(tree, rule.dtype)
    names = frozenset(taken.tensors)
    tensors = [tree.tensors[name] for name in taken.tensors]
    return Preview(
        taken.modules,
        names,
        sum(tensor.numel for tensor in tensors),
        sum(tensor_bytes(tensor, plan.dtypes[tensor.name]) for tensor in tensors),
        sum(tensor_bytes(tensor, rule.dtype) for tensor in tensors),
        len(taken.uncastable),
        uncast_words(tree, taken) if taken.uncastable else "",
        _overridden(plan, rule, tensors),
        fused_words(rule.dtype, names, plan.dtypes, tree.fused_groups),
        frozenset(taken.caches),
        tuple(accumulate((tensor.name in names for tensor in tree.order), initial=0)),
    )


def cache_change(experiment: Experiment, preview: Preview, form: str) -> str:
    """Return the bytes of the KV cache tensors of a preview now and in the format `form`, such as `2.25 MiB → 1.12 MiB at 1,024
    tokens`.
    """
    tensors = [tensor for tensor in experiment.tree.kv_cache.tensors if tensor.name in preview.caches]
    before, after = (experiment.cache_totals(tensors, to).total_bytes for to in (None, form))
    return f"{human_bytes(before)} → {human_bytes(after)} at {experiment.context_words}"


def _overridden(plan: Plan, rule: Rule, tensors: Sequence[TensorInfo]) -> str:
    dtypes = (dtype_given(tensor, rule.dtype) for tensor in tensors)
    changed = (tensor.name for tensor, dtype in zip(tensors, dtypes, strict=True) if plan.dtypes[tensor.name] != dtype)
    by_rule = Counter(plan.decided_by[name] for name in changed if name in plan.decided_by)
    parts = [(f"{count:,}", f"of rule {index + 1}") for index, count in sorted(by_rule.items())]
    if not parts:
        return ""
    (first, of), *others = parts
    first = f"{first} tensor{'' if first == '1' else 's'} {of}"
    return ", ".join((first, *(" ".join(part) for part in others[:2]), *(["…"] if len(others) > 2 else [])))
