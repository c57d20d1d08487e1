"""Puts weights with scales into torchao's layout of safetensors files, which diffusers and transformers read.

The metadata of every file has the names of all tensors of the model, and for each its class in torch or torchao, with the
attributes of that class (`unflatten_tensor_state_dict` in `torchao/prototype/safetensors/safetensors_support.py`). `config.json`
names the settings with which torchao would quantize the layers so (`TorchAoConfig` in
`diffusers/quantizers/quantization_config.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.schemes.torchao import SCHEME
from dtype_engine.core import dtypes
from dtype_engine.core.file_layouts import TORCHAO
from dtype_engine.runtime.export.contents import ExportTensor
from dtype_engine.runtime.export.layout import Layout, Part

_CLASSES = {"int": ("Int8Tensor", "Int8WeightOnlyConfig"), "float": ("Float8Tensor", "Float8WeightOnlyConfig")}
"""(the class of a weight, the class of the settings that give it), by the kind of its codes."""
_SETTINGS = "quantization_config"


def in_torchao_layout(layout: Layout, items: Sequence[ExportTensor]) -> list[ExportTensor]:
    """Return the weights of an export with those that torchao's layout can hold in it, if diffusers loads the export. Their layers'
    inputs are not quantized.
    """
    if layout.kind not in ("component", "pipeline"):
        return list(items)
    return [
        dataclasses.replace(item, file_layout=TORCHAO, quantised_inputs=False)
        if item.portable and not TORCHAO.refusal(item.shape, item.dtype)
        else item
        for item in items
    ]


def with_torchao_settings(
    layout: Layout,
    checkpoint: Checkpoint,
    config: dict[str, Any] | None,
    items: Sequence[ExportTensor],
    linears: Sequence[str],
    computed: Mapping[str, str],
) -> Layout:
    """Return `layout` with a new config.json for each folder in which the weights with scales change: weights in torchao's layout
    are described in it, and those of the source that are decoded no longer.

    config: what `exported_config` made of the checkpoint's config.json. linears: the names of the model's linear modules. computed:
    the dtype with which the model in each folder is loaded, by the prefix of its tensors, or "" for the widest.
    """
    if layout.kind not in ("component", "pipeline"):
        return layout
    before = {component.prefix: component.config for component in checkpoint.components} or {"": checkpoint.config}
    parts, changed = [], set()
    for part in layout.parts:
        of_part = [item for item in items if item.name.startswith(part.prefix)]
        after = dict((config if layout.kind == "component" else before[part.prefix]) or {})
        if any(item.file_layout is TORCHAO for item in of_part):
            plain = [name.removeprefix(part.prefix) for name in linears if name.startswith(part.prefix)]
            after[_SETTINGS] = _settings(part, of_part, plain)
            dtype = computed[part.prefix] or dtypes.widest(item.dtype for item in of_part)
            part = dataclasses.replace(part, computed=dtype)
        elif any(item.coded is not None for item in of_part) and not any(item.copied for item in of_part):
            after.pop(_SETTINGS, None)
        if after != (before[part.prefix] or {}):
            part = dataclasses.replace(part, config=after)
            changed.add(part.path("config.json"))
        parts.append(part)
    copied = tuple((source, path) for source, path in layout.copied if path not in changed)
    return dataclasses.replace(layout, parts=tuple(parts), copied=copied)


def _settings(part: Part, items: Sequence[ExportTensor], linears: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a folder. Loading needs the classes that the metadata names, and not these settings."""
    by_layer = {
        item.name.removeprefix(part.prefix).removesuffix(".weight"): _weight_only(item.dtype)
        for item in items
        if item.file_layout is TORCHAO
    }
    first, *others = by_layer.values()
    same = all(other == first for other in others)
    quant_type = first if same else _torchao("FqnToConfig", 1, fqn_to_config=by_layer)
    rest = [name for name in linears if name not in by_layer]
    return {
        "quant_method": "torchao",
        "quant_type": {"default": quant_type},
        "modules_to_not_convert": rest if same and rest else None,
    }


def _weight_only(dtype: str) -> dict[str, Any]:
    row = dtypes.BY_NAME[dtype]
    granularity = _torchao("PerTensor", 1) if row.per_tensor else _torchao("PerRow", 1, dim=-1)
    return _torchao(_CLASSES[row.kind][1], 2, granularity=granularity)


def _torchao(kind: str, version: int, **data: object) -> dict[str, Any]:
    """Return an object of torchao as JSON (`config_to_dict` in `torchao/core/config.py`)."""
    return {"_type": kind, "_version": version, "_data": data}


def torchao_metadata(part: Part, items: Sequence[ExportTensor]) -> dict[str, str]:
    """Return the metadata that each file of a folder needs if weights in the folder are in torchao's layout, else {}. Weights that
    the export copies keep what the source says of them. items: all weights of the folder, by the names that they have there.
    """
    if not any(item.file_layout is TORCHAO or _is_copy(item) for item in items):
        return {}
    described = {
        item.name: part.metadata[item.name] if _is_copy(item) else json.dumps(_description(item, part.computed))
        for item in items
    }
    return described | {"tensor_names": json.dumps(list(described))}


def _is_copy(item: ExportTensor) -> bool:
    return item.copied and item.coded is not None and item.coded.scheme is SCHEME


def _description(item: ExportTensor, computed: str) -> dict[str, Any]:
    if item.file_layout is not TORCHAO:
        return {"_type": "Tensor"}
    row = dtypes.BY_NAME[item.dtype]
    rows, columns = item.shape
    return {
        "_type": _CLASSES[row.kind][0],
        "_data": {
            "block_size": [rows if row.per_tensor else 1, columns],
            "dtype": {"_type": "torch.dtype", "_data": computed},
        },
        "_tensor_data_names": ["qdata", "scale"],
    }
