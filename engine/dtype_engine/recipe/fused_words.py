"""Tells the user how a plan (the dtypes under a recipe) affects weights that runtimes fuse into one, such as q, k and v."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

from dtype_engine.core import dtypes
from dtype_engine.core.fused import is_split, scale_groups, siblings


def fused_words(dtype: str, taken: Set[str], planned: Mapping[str, str], groups: Iterable[tuple[str, ...]]) -> str:
    """Return words that say how a cast of the weights `taken` to `dtype` affects other weights that runtimes fuse with them, or ""
    if it does not.

    The words are `k_proj, v_proj: new scale` if the common scale of these other weights changes, and `k_proj, v_proj differ: vLLM
    refuses` if their format then differs. planned: the dtype of each weight before the cast. groups: the model's groups of fused
    weights. This function runs after every key press, so of groups that are alike in every layer, it examines only one.
    """
    storage = frozenset(dtypes.STORAGE_DTYPES)
    if dtype not in dtypes.CASTABLE_DTYPES or (dtype not in storage and storage.isdisjoint(planned.values())):
        return ""
    split, rescaled = [], []
    seen: set[tuple[object, ...]] = set()
    for group in groups:
        inside = [member in taken for member in group]
        if all(inside) or not any(inside):
            continue
        kind = (layer_name(group[0]), *inside, *(planned[member] for member in group))
        if kind in seen:
            continue
        seen.add(kind)
        before = {member: planned[member] for member in group}
        after = {member: dtype if member in taken else old for member, old in before.items()}
        others = [member for member in group if member not in taken]
        if is_split(group, after):
            split += [name for name in others if after[name] != dtype]
        shared_before, shared_after = scale_groups(before), scale_groups(after)
        rescaled += [name for name in others if shared_before.get(name) != shared_after.get(name)]
    parts = [f"{_short(rescaled)}: new scale"] if rescaled else []
    parts += [f"{_short(split)} differ: vLLM refuses"] if split else []
    return ", ".join(parts)


def _short(names: Collection[str]) -> str:
    return ", ".join(dict.fromkeys(layer_name(name) for name in names))


def layer_name(name: str) -> str:
    """Return the last part of the name of the layer that holds a weight: `q_proj` for the weight `layers.0.q_proj.weight`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def scale_shared_with(name: str, planned: Mapping[str, str]) -> str:
    """Return the layers whose weights share a scale with the weight `name` under a plan, such as `k, v` for `q_proj`, or "" if
    there are none. planned: the dtypes of the plan, by weight name.

    This function is called for every row of the tree that is drawn, so it examines only the weights that are fused with this one.
    """
    group = [member for member in siblings(name) if member in planned]
    members = scale_groups({member: planned[member] for member in group}).get(name, ()) if len(group) > 1 else ()
    return ", ".join(layer_name(member).removesuffix("_proj") for member in members if member != name)


def fused_with(name: str, planned: Mapping[str, str]) -> str:
    """Return words that name the weights which vLLM and SGLang fuse with the weight `name`, and say whether they accept the planned
    formats. planned: the dtypes of the plan, by weight name.

    Returns "" if the weight is fused with no other.
    """
    group = [member for member in siblings(name) if member in planned]
    if len(group) < 2:
        return ""
    others = [member for member in group if member != name]
    words = f"with {_short(others)} in vLLM and SGLang"
    differ = [
        f"{layer_name(other)} {dtypes.short_name(planned[other])}"
        for other in others
        if planned[other] != planned[name]
    ]
    if is_split(group, planned):
        return f"{words}, which refuse different formats: {', '.join(differ)}"
    if name in scale_groups({member: planned[member] for member in group}):
        return f"{words}: they share one tensor scale"
    return words
