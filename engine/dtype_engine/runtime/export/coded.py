"""Decides what an export does with weights that another program quantized: copy their tensors unchanged, or decode and rewrite
them.

One entry of config.json, such as `quantization_config`, describes all of these weights. If a rule casts any weight of the model to
a format with scales, all quantized weights are decoded, because the entry can't describe both formats. If no rule casts a quantized
weight, all are copied. If rules cast some of them, the weights without a rule are copied, provided that the entry can list the
modules of the cast weights as not quantized. Otherwise, all are decoded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from dtype_engine.checkpoint import Checkpoint, CheckpointTensor
from dtype_engine.checkpoint.schemes import CodedWeight
from dtype_engine.checkpoint.schemes.registry import schemes
from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.runtime.export.contents import ExportTensor
from dtype_engine.runtime.export.experts import expert_layer
from dtype_engine.runtime.export.layout import Layout

_ENTRIES = ("quantization_config", "quantization", "compression_config")
"""The entries of config.json in which programs describe how they quantized the weights."""


def exported_config(checkpoint: Checkpoint, of_files: dict[str, str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return (the content of the export's config.json, the names of the quantized weights that must be decoded although no rule
    casts them). Changes `of_files`: sets the dtype to which these weights are decoded.

    of_files: the planned dtype of each weight, by its name in the files.
    """
    config = checkpoint.config
    coded = {name: weight for name, weight in checkpoint.coded.items() if not weight.own}
    kept = [name for name, weight in coded.items() if of_files[name] == weight.format]
    cast = [name for name in coded if of_files[name] != coded[name].format]
    scaled = any(dtype in dtypes.STORAGE_DTYPES and dtype != checkpoint.dtype(name) for name, dtype in of_files.items())
    if checkpoint.form == "gguf" or (kept and not cast and not scaled):
        return config, []  # weights in GGUF blocks can't be written, and are refused later
    if kept and not scaled and (listing := _with_plain_modules(checkpoint, cast)) is not None:
        return listing, []
    of_files |= dict.fromkeys(kept, checkpoint.decoded_dtype)
    return (_without_entries(config) if config is not None and coded else config), kept


def _without_entries(config: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in config.items() if key not in _ENTRIES}
    text = rest.get("text_config")
    return rest | ({"text_config": _without_entries(text)} if isinstance(text, dict) else {})


def _with_plain_modules(checkpoint: Checkpoint, weights: Sequence[str]) -> dict[str, Any] | None:
    """Return the content of the source's config.json with the modules of `weights` listed as not quantized. Returns None if the
    quantization method has no such list, or one of the weights belongs to an expert or to no linear layer.
    """
    changed = copy.deepcopy(checkpoint.config or {})
    settings = changed.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    method = str(settings.get("quant_method"))
    key = next((scheme.ignored[0] for scheme in schemes() if method in scheme.ignored_by), None)
    modules = [name.removesuffix(".weight") for name in weights]
    if key is None or any(
        module == name or expert_layer(module) for module, name in zip(modules, weights, strict=True)
    ):
        return None
    before = settings.get(key)
    if before is None:  # without a list, transformers skips the head; with a list, only what the list names
        others = checkpoint.weights.keys() - checkpoint.coded.keys()
        before = sorted(name.removesuffix(".weight") for name in others if len(checkpoint.weights[name].shape) == 2)
    settings[key] = [*before, *modules]
    return changed


def copies_of(checkpoint: Checkpoint, weight: CodedWeight) -> tuple[CheckpointTensor, ...]:
    """Return the tensors of the files that the export copies for a quantized weight. A tensor that holds several weights, such as
    stacked experts, is returned only for the first of these weights, so that it is copied once.
    """
    whole = {part.name: checkpoint.tensors[part.name] for part in weight.tensors}
    return tuple(tensor for name, tensor in whole.items() if checkpoint.owners[name] == weight.name)


def layout_beside(layout: Layout, checkpoint: Checkpoint, items: Sequence[ExportTensor]) -> Layout:
    """Return `layout`, with the metadata of the source's files added if the export copies tensors that another program quantized.
    That program may need the metadata.
    """
    if not any(item.copied for item in items):
        return layout
    parts = (dataclasses.replace(part, metadata={**checkpoint.metadata, **part.metadata}) for part in layout.parts)
    return dataclasses.replace(layout, parts=tuple(parts))


def decoded_notice(decoded: Collection[str], items: Sequence[ExportTensor]) -> tuple[str, ...]:
    """Return a notice about the weights that an export decodes although no rule casts them. decoded: their names."""
    if not decoded:
        return ()
    first = next(item for item in items if item.coded is not None and item.name in decoded)
    return (
        f"{plural(len(decoded), 'weight')} that no rule casts, first {printable(first.name)}, will be decoded from {first.stored} "
        f"to {first.dtype}, because config.json can't describe them beside the others",
    )
