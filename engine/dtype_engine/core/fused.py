"""Groups of linear layers that runtimes fuse into one matrix.

vLLM and SGLang concatenate q/k/v, gate/up and an expert's w1/w3 when they load a model, so the members of a group must have the
same format and, in NVFP4, the same tensor scale. If tensor scales differ, vLLM loads all members with the largest one, which
changes values (`CompressedTensorsW4A4Fp4.process_weights_after_loading`). The groups are those for which llm-compressor shares
the tensor scale (`FUSED_LAYER_NAMES` in `llmcompressor/observers/helpers.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dtype_engine.core import dtypes
from dtype_engine.core.llama_types import llama_type

FUSED_LAYERS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
_FUSED_NAMES = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj",
}
"""The names that runtimes give to fused layers, except for those of experts."""
_GROUP_OF = {name: group for group in FUSED_LAYERS for name in group}
_WEIGHT = ".weight"


def siblings(name: str) -> tuple[str, ...]:
    """Return the names of all weights in the fused group of `name`, including any that a model lacks. Returns () if there is no
    group.
    """
    module, dot, local = name.removesuffix(_WEIGHT).rpartition(".")
    if not name.endswith(_WEIGHT) or local not in _GROUP_OF:
        return ()
    return tuple(f"{module}{dot}{member}{_WEIGHT}" for member in _GROUP_OF[local])


def fused_groups(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of which at least two members are in `names`, in the order in which runtimes concatenate them."""
    known = dict.fromkeys(names)
    groups = dict.fromkeys(siblings(name) for name in known)
    present = (tuple(member for member in group if member in known) for group in groups)
    return tuple(group for group in present if len(group) > 1)


def fused_name(group: Sequence[str]) -> str:
    """Return the name that runtimes give to the layer that they fuse from a group of `fused_groups`, or "" if it is unknown."""
    module, dot, local = group[0].removesuffix(_WEIGHT).rpartition(".")
    name = _FUSED_NAMES.get(_GROUP_OF[local])
    return f"{module}{dot}{name}" if name else ""


def scale_groups(planned: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the groups of weights that share a tensor scale, as a mapping from each weight's name to the names of its whole group.
    The members of a fused group share it if they have the same format with such scales (NVFP4, `fp8@fused`), whatever its rounding.
    planned: dtypes by weight name.
    """
    shared: dict[str, tuple[str, ...]] = {}
    with_scale = [name for name, dtype in planned.items() if _has_tensor_scale(dtype)]
    for group in fused_groups(with_scale):
        for member in group:
            form = dtypes.unrounded(planned[member])
            alike = tuple(other for other in group if dtypes.unrounded(planned[other]) == form)
            if len(alike) > 1:
                shared[member] = alike
    return shared


def whole_scale_group(name: str, dtype: str, names: Collection[str]) -> tuple[str, ...]:
    """Return the weights in `names` that share one tensor scale if all have the format `dtype`: `name` and others of its fused
    group. Returns () if there are no others, or if the format has no tensor scale.
    """
    if not _has_tensor_scale(dtype):
        return ()
    group = tuple(member for member in siblings(name) if member in names)
    return group if len(group) > 1 else ()


def _has_tensor_scale(dtype: str) -> bool:
    row = dtypes.BY_NAME.get(dtype)
    return row is not None and (row.scales == "fused" or (row.blocks is not None and row.blocks.tensor_scale))


def split_groups(planned: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Return the fused groups that no kernel supports, because a plan gives their members different formats."""
    return tuple(group for group in fused_groups(planned) if is_split(group, planned))


def is_split(group: Iterable[str], planned: Mapping[str, str]) -> bool:
    """Return whether a group's weights have different formats, at least one with scales. No fused kernel supports this. A format
    is the same with another rounding. llama.cpp, which does not fuse, has its own types.
    """
    formats = {dtypes.unrounded(planned[member]) for member in group}
    return len(formats) > 1 and any(each in dtypes.STORAGE_DTYPES and llama_type(each) is None for each in formats)
