"""Finds the rules of a plan that affect a node of the tree, and the nodes that a plan casts."""

from __future__ import annotations

from collections.abc import Iterator

from dtype_engine.core import dtypes
from dtype_engine.core.kv_cache import KV_CACHE
from dtype_engine.core.kv_formats import names_caches
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.core.units import plural
from dtype_engine.recipe import Plan, Rule, RuleEffect, generalisations
from dtype_tui.state.folds import modules_at


def tensor_names(tree: Tree, node: str) -> set[str]:
    """Return the canonical names of the tensors at or below a module, a tensor or a fold, such as `layers.{2..9}`."""
    if modules := modules_at(tree, node):
        return {tensor.name for module in modules for tensor in tree.below(module.name)}
    found = tree.canonical(node)
    return {found.name} if found else set()


def touched_names(tree: Tree, node: str) -> set[str]:
    """Return the names of everything at or below a node that rules may cast: tensors, and tensors of KV caches."""
    return tensor_names(tree, node) | {
        tensor.name
        for tensor in tree.kv_cache.tensors
        if KV_CACHE in node and (tensor.name == node or tensor.name.startswith(f"{node}."))
    }


def rules_within(tree: Tree, plan: Plan, node: str) -> tuple[list[int], list[int]]:
    """Return (indices of the rules that match only tensors at or below a node, indices of the rules that also match others)."""
    inside_node = touched_names(tree, node)
    inside: list[int] = []
    beyond: list[int] = []
    for index, taken in enumerate(plan.selections):
        touched = {*taken.tensors, *taken.caches}
        if touched & inside_node:
            (inside if touched <= inside_node else beyond).append(index)
    return inside, beyond


def reference_rule(tree: Tree, node: str, reference: str = "float32") -> Rule:
    """Return the rule that gives the tensors of a node the dtype that they have in the reference.

    The reference is the model as stored, or it has float64 for tensors stored in float64 and float32 for all others. Since one rule
    can't cast to both, the rule keeps a node as stored whose tensors are all stored in float32 or float64. Other nodes are cast to
    float32, their float64 tensors included. For a KV cache, the rule removes its format.

    reference: such as "float32" or "as stored (bfloat16)".
    """
    stored = {tree.tensors[name].dtype for name in tensor_names(tree, node) if tree.tensors[name].castable}
    keeps = (
        reference.startswith("as stored")
        or names_caches(node)
        or ("float64" in stored and stored <= {"float32", "float64"})
    )
    return Rule.make(generalisations(node)[0], dtypes.STORED if keeps else "float32")


def never_cast_count(tree: Tree, node: str) -> int:
    """Return how many tensors at or below a node are never cast, because they are unused or parts of quantized weights."""
    if modules := modules_at(tree, node):
        return tree.never_cast[modules[-1].end] - tree.never_cast[modules[0].first]
    found = tree.canonical(node)
    return int(found is not None and found.uncastable_reason is not None)


def effects_on(tree: Tree, plan: Plan, node: str) -> list[RuleEffect]:
    """Return what the rules that match tensors of a node do to them, the last rule first."""
    effects = plan.effects(tree, touched_names(tree, node))
    return [effect for effect in effects if effect.matches][::-1]


def counts_by_rule(tree: Tree, plan: Plan, node: str) -> list[str]:
    """Return how many tensors of a node get their dtype from which rule, such as ["24 tensors by rule 1", "33 as stored"]."""
    effects = [effect for effect in effects_on(tree, plan, node) if effect.decides]
    fixed = never_cast_count(tree, node)
    stored = len(touched_names(tree, node)) - sum(effect.decides for effect in effects) - fixed
    counts = [(effect.decides, f"by rule {effect.index + 1}") for effect in reversed(effects)]
    counts += [(stored, "as stored"), (fixed, "never cast")]
    (first, how), *others = [each for each in counts if each[0]] or [(0, "as stored")]
    return [f"{plural(first, 'tensor')} {how}", *(f"{count:,} {how}" for count, how in others)]


def cast_nodes(tree: Tree, plan: Plan) -> list[str]:
    """Return the topmost modules whose castable tensors all get another dtype than the stored one. Tensors that get another dtype,
    but lie in no such module, are returned as well.
    """
    castable, changed = [0], [0]
    for tensor in tree.order:
        castable.append(castable[-1] + tensor.castable)
        changed.append(changed[-1] + (plan.dtypes[tensor.name] != tensor.dtype))
    found: list[str] = []
    stack = [tree.root]
    while stack:
        node = stack.pop()
        changed_below = changed[node.end] - changed[node.first]
        if changed_below and changed_below == castable[node.end] - castable[node.first]:
            found.append(node.name)
        elif changed_below:
            prefix = f"{node.name}." if node.name else ""
            found += [
                tensor.name
                for local, tensor in node.tensors.items()
                if tensor.name == prefix + local and plan.dtypes[tensor.name] != tensor.dtype
            ]
            stack.extend(reversed(node.children.values()))
    return found


def not_kept_in_float32(tree: Tree, plan: Plan, index: int) -> Iterator[str]:
    """Yield modules and tensors that the model declares to need float32, and that the rule at `index` casts to a smaller dtype."""

    def is_broken(tensor: TensorInfo) -> bool:
        wide = ("float32", "float64", tensor.dtype)
        return plan.decided_by.get(tensor.name) == index and plan.dtypes[tensor.name] not in wide

    for module in tree.modules.values():
        if module.keep_in_fp32 and any(map(is_broken, module.tensors.values())):
            yield module.name
    yield from (name for name in tree.kept_in_fp32 if is_broken(tree.tensors[name]))
