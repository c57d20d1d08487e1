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
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe.loader_facts import loaded_dtype
from dtype_engine.runtime.export.contents import ExportTensor
from dtype_engine.runtime.export.layout import Layout, Part
from dtype_engine.runtime.export.notices import passed_dtype

_CLASSES = {"int": ("Int8Tensor", "Int8WeightOnlyConfig"), "float": ("Float8Tensor", "Float8WeightOnlyConfig")}
"""(the class of a weight, the class of the settings that give it), by the kind of its codes."""
_SETTINGS = "quantization_config"


def loaded_dtypes(
    layout: Layout, items: Sequence[ExportTensor], tree: Tree, infos: Mapping[str, TensorInfo]
) -> dict[str, str]:
    """Return the dtype with which to load the model in each folder of an export for diffusers, by the prefix of its tensors. It is
    that of all weights without scales but those that the model's code keeps in float32, or else the widest.

    infos: the model's tensors by their names in the files.
    """
    if layout.kind not in ("component", "pipeline"):
        return {}
    by_part = {part.prefix: [item for item in items if item.name.startswith(part.prefix)] for part in layout.parts}
    return {
        prefix: passed_dtype(tree, of_part, infos) or dtypes.widest(item.dtype for item in of_part)
        for prefix, of_part in by_part.items()
    }


def in_torchao_layout(
    items: Sequence[ExportTensor],
    loaded: Mapping[str, str],
    loaders: Sequence[tuple[str, bool]],
    tree: Tree,
    infos: Mapping[str, TensorInfo],
) -> list[ExportTensor]:
    """Return the weights of an export with those that torchao's layout can hold in it, if diffusers loads the export. Their layers'
    inputs are not quantized.

    A layer computes in the dtype in which the loader has its weight, and torchao's fp8 raises an error if its values have another.
    loaded: what `loaded_dtypes` returns. loaders: (the prefix of a model's tensors, True if diffusers loads the model) for each.
    """
    found = []
    for item in items:
        prefix = next((each for each in loaded if item.name.startswith(each)), None)
        if prefix is not None and item.portable and not TORCHAO.refusal(item.shape, item.dtype):
            dtype = loaded_dtype(tree, infos[item.name], loaded[prefix], dict(loaders)[prefix])
            item = dataclasses.replace(item, file_layout=TORCHAO, computed=dtype, quantised_inputs=False)
        found.append(item)
    return found


def with_torchao_settings(
    layout: Layout,
    checkpoint: Checkpoint,
    config: dict[str, Any] | None,
    items: Sequence[ExportTensor],
    linears: Sequence[str],
    loaded: Mapping[str, str],
) -> Layout:
    """Return `layout` with a new config.json for each folder in which the weights with scales change: weights in torchao's layout
    are described in it, and those of the source that are decoded no longer.

    config: what `exported_config` made of the checkpoint's config.json. linears: the names of the model's linear modules. loaded:
    what `loaded_dtypes` returns.
    """
    if not loaded:
        return layout
    before = {component.prefix: component.config for component in checkpoint.components} or {"": checkpoint.config}
    parts, changed = [], set()
    for part in layout.parts:
        of_part = [item for item in items if item.name.startswith(part.prefix)]
        after = dict((config if layout.kind == "component" else before[part.prefix]) or {})
        if any(item.file_layout is TORCHAO for item in of_part):
            plain = [name.removeprefix(part.prefix) for name in linears if name.startswith(part.prefix)]
            after[_SETTINGS] = _settings(part, of_part, plain)
            part = dataclasses.replace(part, loaded=loaded[part.prefix])
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
        item.name: part.metadata[item.name] if _is_copy(item) else json.dumps(_description(item)) for item in items
    }
    return described | {"tensor_names": json.dumps(list(described))}


def _is_copy(item: ExportTensor) -> bool:
    return item.copied and item.coded is not None and item.coded.scheme is SCHEME


def _description(item: ExportTensor) -> dict[str, Any]:
    if item.file_layout is not TORCHAO:
        return {"_type": "Tensor"}
    row = dtypes.BY_NAME[item.dtype]
    rows, columns = item.shape
    return {
        "_type": _CLASSES[row.kind][0],
        "_data": {
            "block_size": [rows if row.per_tensor else 1, columns],
            "dtype": {"_type": "torch.dtype", "_data": item.computed},
        },
        "_tensor_data_names": ["qdata", "scale"],
    }
