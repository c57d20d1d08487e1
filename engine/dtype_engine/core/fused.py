"""Linear layers that runtimes multiply as one: which weights belong together. Without torch.

vLLM and SGLang put q/k/v, gate/up and an expert's w1/w3 into one matrix when they load a model, so the members of a group must have
one format, and in NVFP4 one scale of the tensor. The names are those that llm-compressor shares it among (`FUSED_LAYER_NAMES` of
`llmcompressor/observers/helpers.py`): a checkpoint whose members have different ones is loaded with the largest, and computes
something else (vLLM's `CompressedTensorsW4A4Fp4.process_weights_after_loading` warns of it).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from dtype_engine.core import dtypes

FUSED_LAYERS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
_GROUP_OF = {name: group for group in FUSED_LAYERS for name in group}
_WEIGHT = ".weight"


def siblings(name: str) -> tuple[str, ...]:
    """The names that a weight's group would have, its own among them, whether they are there or not; () for a weight of none."""
    module, dot, local = name.removesuffix(_WEIGHT).rpartition(".")
    if not name.endswith(_WEIGHT) or local not in _GROUP_OF:
        return ()
    return tuple(f"{module}{dot}{member}{_WEIGHT}" for member in _GROUP_OF[local])


def fused_groups(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The groups among these names of weights with two members or more, each in the order in which a runtime puts it."""
    known = dict.fromkeys(names)
    groups = dict.fromkeys(siblings(name) for name in known)
    present = (tuple(member for member in group if member in known) for group in groups)
    return tuple(group for group in present if len(group) > 1)


def scale_groups(planned: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The weights that share the scale of the tensor under a plan (dtypes by name): each with all of its group that do.

    Those are the members of a group that are in a format with such a scale. A weight that shares with none is left out.
    """
    shared: dict[str, tuple[str, ...]] = {}
    with_scale = [name for name, dtype in planned.items() if _has_tensor_scale(dtype)]
    for group in fused_groups(with_scale):
        for member in group:
            alike = tuple(other for other in group if planned[other] == planned[member])
            if len(alike) > 1:
                shared[member] = alike
    return shared


def whole_scale_group(name: str, dtype: str, names: Collection[str]) -> tuple[str, ...]:
    """The weights among `names` that one shares the scale of the tensor with when its whole group is in `dtype`, itself among
    them; () where it shares with none.
    """
    if not _has_tensor_scale(dtype):
        return ()
    group = tuple(member for member in siblings(name) if member in names)
    return group if len(group) > 1 else ()


def _has_tensor_scale(dtype: str) -> bool:
    row = dtypes.BY_NAME.get(dtype)
    return row is not None and row.blocks is not None and row.blocks.tensor_scale


def split_groups(planned: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """The groups that `is_split`."""
    return tuple(group for group in fused_groups(planned) if is_split(group, planned))


def is_split(group: Iterable[str], planned: Mapping[str, str]) -> bool:
    """Whether weights of a group are in different formats, one of them a storage format at least: no fused kernel takes them."""
    formats = {planned[member] for member in group}
    return len(formats) > 1 and not formats.isdisjoint(dtypes.STORAGE_DTYPES)
