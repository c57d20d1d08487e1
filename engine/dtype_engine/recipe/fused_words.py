"""Tells the user how the planned dtypes affect weights that runtimes fuse into one, such as q, k and v."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

from dtype_engine.core import dtypes
from dtype_engine.core.fused import is_split, scale_groups, siblings


def fused_words(dtype: str, taken: Set[str], planned: Mapping[str, str], groups: Iterable[tuple[str, ...]]) -> str:
    """Return how a cast of the weights `taken` to `dtype` affects other weights that runtimes fuse with them, or "" if it does not.
    `k_proj, v_proj: new scale` means that their common scale changes, `k_proj, v_proj differ: vLLM refuses` that their formats then
    differ.

    planned: the dtype of each weight before the cast. groups: the model's groups of fused weights. Of groups that are alike in all
    layers, only one is examined, because this runs after every key press.
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
            split += [name for name in others if dtypes.unrounded(after[name]) != dtypes.unrounded(dtype)]
        shared_before, shared_after = scale_groups(before), scale_groups(after)
        rescaled += [name for name in others if shared_before.get(name) != shared_after.get(name)]
    parts = [f"{_short(rescaled)}: new scale"] if rescaled else []
    parts += [f"{_short(split)} differ: vLLM refuses"] if split else []
    return ", ".join(parts)


def _short(names: Collection[str]) -> str:
    return ", ".join(dict.fromkeys(layer_name(name) for name in names))


def layer_name(name: str) -> str:
    """Return the name of the layer that holds a weight: `q_proj` for `layers.0.q_proj.weight`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def scale_shared_with(name: str, planned: Mapping[str, str]) -> str:
    """Return the layers whose weights share a scale with the weight `name`, such as `k, v`, or "" if there are none. planned: the
    dtype of each weight. Called for every row that is drawn.
    """
    group = {member: planned[member] for member in siblings(name) if member in planned}
    members = scale_groups(group).get(name, ()) if len(group) > 1 else ()
    return ", ".join(layer_name(member).removesuffix("_proj") for member in members if member != name)


def fused_with(name: str, planned: Mapping[str, str]) -> str:
    """Return words for the user about the weights that vLLM and SGLang fuse with the weight `name`: their names, and whether both
    programs accept the planned formats. Returns "" if there are no such weights. planned: the dtype of each weight.
    """
    group = {member: planned[member] for member in siblings(name) if member in planned}
    if len(group) < 2:
        return ""
    others = [member for member in group if member != name]
    words = f"with {_short(others)} in vLLM and SGLang"
    if is_split(group, planned):
        own = dtypes.unrounded(planned[name])
        differ = [other for other in others if dtypes.unrounded(planned[other]) != own]
        formats = (f"{layer_name(other)} {dtypes.short_name(planned[other])}" for other in differ)
        return f"{words}, which refuse different formats: {', '.join(formats)}"
    if name in scale_groups(group):
        return f"{words}: they share one tensor scale"
    return words
