"""How vLLM and transformers load experts that an export stores with scales. transformers packs all experts of a layer into one
weight.

The statements about transformers were tried (`recipe/loader_facts.py`); those about vLLM follow from its source code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.recipe.loader_facts import misread_experts
from dtype_engine.runtime.export.contents import ExportTensor

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.\w+")


def expert_layer(module: str) -> str:
    """Return the name of the module that holds all experts of a layer, such as `model.layers.0.mlp.experts`, if `module` is a child
    of one of these experts, such as `model.layers.0.mlp.experts.3.up_proj`. Otherwise, return "".
    """
    found = _EXPERT.fullmatch(module)
    return found[1] if found else ""


def all_experts(layer: str) -> str:
    """Return a pattern in compressed-tensors' syntax that matches the linear layers of all experts in the module `layer`. vLLM
    looks up experts as `0.gate_proj`, `0.up_proj` and `0.down_proj`, whatever the checkpoint's names. transformers looks them up
    with a regular expression that contains `experts`.
    """
    return rf"re:{re.escape(layer)}\.\d+\.\w+$"


def targets_of(modules: Iterable[str], rest: Iterable[str], name_of: Callable[[str], str] = all_experts) -> list[str]:
    """Return the entries that list the linear modules of a group in quantization settings: the exact names of modules, and one
    pattern, `name_of(layer)`, for each layer whose experts are all in the group.

    rest: the linear modules outside the group. A layer that has an expert among them gets no pattern, which would match this
    expert, too.
    """
    split = {expert_layer(module) for module in rest}
    named = (name_of(layer) if (layer := expert_layer(module)) and layer not in split else module for module in modules)
    return list(dict.fromkeys(named))


def experts(items: Sequence[ExportTensor]) -> list[ExportTensor]:
    """Return those of `items` that are weights of experts in a layout that other programs read. transformers packs such weights
    when it loads them; other programs load each separately.
    """
    return [item for item in items if item.packed_into and item.portable]


def misread(items: Sequence[ExportTensor]) -> str | None:
    """Return what goes wrong when `from_pretrained` of transformers loads the experts among `items`, such as "it raises an error
    when it packs experts in mxfp8". Returns None if they are loaded correctly, or are not in a compressed-tensors layout.
    """
    packed = [item for item in items if item.packed_into and item.name.endswith(".weight")]
    of_layers: dict[str, set[str]] = {}
    for item in packed:
        of_layers.setdefault(expert_layer(item.name.removesuffix(".weight")), set()).add(item.dtype)
    split = any(len(found) > 1 for found in of_layers.values())
    first = next((item.dtype for item in items if item.portable), "")
    return misread_experts({item.dtype for item in packed}, first, split)


def experts_notices(items: Sequence[ExportTensor]) -> tuple[str, ...]:
    """Return sentences for the user about experts with scales that transformers or vLLM can't load."""
    notices = []
    if (problem := misread(items)) is not None:
        first = next(item for item in items if item.packed_into and item.name.endswith(".weight"))
        notices.append(
            f"experts (first {printable(first.name)}) are in the layout that vLLM reads; from_pretrained of transformers 5 does "
            f"not read them ({problem}) and raises an error"
        )
    formats: dict[str, dict[tuple[str, bool], None]] = {}
    for item in items:
        if item.packed_into and item.name.endswith(".weight"):
            of_layer = formats.setdefault(item.packed_into.rpartition(".")[0], {})
            of_layer[item.dtype, item.quantised_inputs] = None
    split = [
        layer
        for layer, found in formats.items()
        if len(found) > 1 and any(dtype in dtypes.STORAGE_DTYPES for dtype, _ in found)
    ]
    if split:
        each = ", ".join(dtype for dtype, _ in formats[split[0]])
        notices.append(
            f"vLLM needs one format for all experts of a layer and will refuse to load this: first {printable(split[0])}: {each}"
        )
    return tuple(notices)
