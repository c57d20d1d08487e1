"""What an export does with weights that another program quantised: copy their tensors, or decode and write them anew.

The entry in config.json by which that program reads its weights describes all of them. They are copied if no rule casts any, or if
this entry can list the modules of those that rules cast to plain dtypes. Otherwise all of them are decoded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from dtype_engine.checkpoint import Checkpoint, CheckpointTensor
from dtype_engine.checkpoint.schemes import EncodedWeight
from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.runtime.export.contents import ExportTensor
from dtype_engine.runtime.export.experts import expert_layer
from dtype_engine.runtime.export.layout import Layout
from dtype_engine.runtime.model.encoded_loading import decoded_dtype

_ENTRIES = ("quantization_config", "quantization", "compression_config")
"""The entries of config.json in which programs describe how they quantised the weights."""
_PLAIN_MODULES = {
    "fp8": "modules_to_not_convert", "awq": "modules_to_not_convert", "compressed-tensors": "ignore",
    "modelopt": "ignore", "bitsandbytes": "llm_int8_skip_modules",
}  # fmt: skip
"""For each quantisation method of transformers, the key under which its settings list the modules that are not quantised."""


def exported_config(checkpoint: Checkpoint, of_files: dict[str, str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the source's config.json as the export needs it, and the weights that are decoded although no rule casts them. Their
    dtypes in `of_files` are changed to the dtype to which they are decoded.

    of_files: the planned dtype of each weight of the files.
    """
    config, encoded = checkpoint.config, checkpoint.encoded
    kept = [name for name, weight in encoded.items() if of_files[name] == weight.format]
    cast = [name for name in encoded if of_files[name] != encoded[name].format]
    scaled = any(dtype in dtypes.STORAGE_DTYPES and dtype != checkpoint.dtype(name) for name, dtype in of_files.items())
    if checkpoint.form == "gguf" or (kept and not cast and not scaled):
        return config, []  # what has the blocks of a GGUF file can't be written, and is refused later
    if kept and not scaled and (listing := _with_plain_modules(checkpoint, cast)) is not None:
        return listing, []
    of_files |= dict.fromkeys(kept, decoded_dtype(checkpoint))
    return (_without_entries(config) if config is not None and encoded else config), kept


def _without_entries(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration, and that of its text part, without what it says about quantised weights."""
    rest = {key: value for key, value in config.items() if key not in _ENTRIES}
    text = rest.get("text_config")
    return rest | ({"text_config": _without_entries(text)} if isinstance(text, dict) else {})


def _with_plain_modules(checkpoint: Checkpoint, weights: Sequence[str]) -> dict[str, Any] | None:
    """Return the source's configuration with the modules of `weights` listed as not quantised. Returns None if the method has no
    such list, or if the weights are not those of single linear layers.
    """
    changed = copy.deepcopy(checkpoint.config or {})
    settings = changed.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    key = _PLAIN_MODULES.get(str(settings.get("quant_method")))
    modules = [name.removesuffix(".weight") for name in weights]
    if key is None or any(
        module == name or expert_layer(module) for module, name in zip(modules, weights, strict=True)
    ):
        return None
    before = settings.get(key)
    if before is None:  # without a list, transformers leaves out the head, which a list then has to name
        others = checkpoint.weights.keys() - checkpoint.encoded.keys()
        before = sorted(name.removesuffix(".weight") for name in others if len(checkpoint.weights[name].shape) == 2)
    settings[key] = [*before, *modules]
    return changed


def copies_of(checkpoint: Checkpoint, weight: EncodedWeight) -> tuple[CheckpointTensor, ...]:
    """Return the tensors of the files that hold a weight, except those that an earlier weight has as well, so that each is copied
    once.
    """
    whole = {part.name: checkpoint.tensors[part.name] for part in weight.tensors}
    return tuple(tensor for name, tensor in whole.items() if checkpoint.owners[name] == weight.name)


def layout_beside(layout: Layout, checkpoint: Checkpoint, items: Sequence[ExportTensor]) -> Layout:
    """Return the layout with the metadata of the source's files if tensors of another program are copied, which may need it."""
    if not any(item.copied for item in items):
        return layout
    parts = (dataclasses.replace(part, metadata={**checkpoint.metadata, **part.metadata}) for part in layout.parts)
    return dataclasses.replace(layout, parts=tuple(parts))


def decoded_notice(decoded: Collection[str], items: Sequence[ExportTensor]) -> tuple[str, ...]:
    """Return a sentence about the weights that another program quantised and that the export decodes although no rule casts them.
    decoded: these weights. items: all weights to export.
    """
    if not decoded:
        return ()
    first = next(item for item in items if item.encoded is not None and item.name in decoded)
    return (
        f"{plural(len(decoded), 'weight')} that no rule casts, first {printable(first.name)}, will be decoded from {first.stored} "
        f"to {first.dtype}, because config.json can't describe them beside the others",
    )
