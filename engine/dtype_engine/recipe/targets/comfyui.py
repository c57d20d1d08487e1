"""Converts recipes for ComfyUI.

The result is the `_quantization_metadata` entry of a safetensors header, which names each quantized layer.
"""

from __future__ import annotations

import json

from dtype_engine.core import dtypes
from dtype_engine.recipe.targets.base import (
    Context,
    Conversion,
    Match,
    Target,
    loading_note,
    split,
    weights_in,
    weights_of,
)

NAME = "comfyui"
KINDS = frozenset({"Linear"})
FORMATS = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "int8": "int8_tensorwise"}
"""ComfyUI's name for each dtype that it can quantize to. Each of these formats has a single scale per tensor."""


def convert(context: Context) -> Conversion:
    parts = split(
        context, "ComfyUI", (*FORMATS, *(name + dtypes.PER_TENSOR for name in FORMATS)), KINDS, by_transformers=False
    )
    layers: dict[str, dict[str, str]] = {}
    for name, dtype in parts.low.items():
        row = dtypes.BY_NAME[dtype]
        layers[name.rpartition(".")[0]] = {"format": FORMATS[row.torch_name]}
        if not row.per_tensor:
            parts.losses.add(
                name, dtype, row.torch_name + dtypes.PER_TENSOR, "ComfyUI has one scale for the whole tensor", "scale"
            )
    # Values in the header are strings, so the entry is JSON inside JSON.
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    notes = [
        loading_note(parts.base),
        "for every listed weight, the file also needs its scale, a float32 scalar named NAME.weight_scale",
    ]
    if any(entry["format"] == FORMATS["int8"] for entry in layers.values()):
        notes.append("int8_tensorwise needs a recent ComfyUI; its first releases with this metadata had float8 only")
    return Conversion(
        json.dumps(metadata, indent=2) + "\n",
        tuple((layer, entry["format"]) for layer, entry in layers.items()),
        parts.base,
        parts.losses.result(),
        tuple(notes),
    )


def match(context: Context, pattern: str) -> Match:
    taken = weights_of(context, KINDS).get(pattern)
    return Match(frozenset((taken,)) if taken else frozenset(), None if taken else "layers are named one by one")


TARGET = Target(NAME, "exact layer names", None, convert, weights_in(KINDS), match)
