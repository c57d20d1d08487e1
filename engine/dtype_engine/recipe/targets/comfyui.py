"""Converts recipes for ComfyUI.

The result is the `_quantization_metadata` entry of a safetensors header, which names each quantized layer.
"""

from __future__ import annotations

import json

from dtype_engine.core import dtypes
from dtype_engine.recipe.targets.base import Context, Conversion, Match, Quantizer

_NAMES = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "int8": "int8_tensorwise"}
"""ComfyUI's name for each dtype that it can quantize to. Each of these formats has a single scale per tensor."""


class ComfyUI(Quantizer):
    name, title = "comfyui", "ComfyUI"
    matcher = "exact layer names"
    kinds = frozenset({"Linear"})
    formats = (*_NAMES, *(name + dtypes.PER_TENSOR for name in _NAMES))
    by_transformers = False

    def write(self, context: Context) -> Conversion:
        parts = self.split(context)
        layers: dict[str, dict[str, str]] = {}
        for name, dtype in parts.low.items():
            row = dtypes.BY_NAME[dtype]
            layers[name.rpartition(".")[0]] = {"format": _NAMES[row.torch_name]}
            if not row.per_tensor:
                instead = row.torch_name + dtypes.PER_TENSOR
                parts.losses.add(name, dtype, instead, "ComfyUI has one scale for the whole tensor", "scale")
        # Values in the header are strings, so the entry is JSON inside JSON.
        metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
        text = json.dumps(metadata, indent=2) + "\n"
        patterns = tuple((layer, entry["format"]) for layer, entry in layers.items())
        notes = [
            parts.loading_note(),
            "for every listed weight, the file also needs its scale, a float32 scalar named NAME.weight_scale",
        ]
        if any(written == _NAMES["int8"] for _, written in patterns):
            notes.append(
                "int8_tensorwise needs a recent ComfyUI; its first releases with this metadata had float8 only"
            )
        return Conversion(text, patterns, parts.base, parts.losses.result(), tuple(notes))

    def match(self, context: Context, pattern: str) -> Match:
        taken = self.weights(context).get(pattern)
        return Match(frozenset((taken,))) if taken else Match(problem="layers are named one by one")


TARGET = ComfyUI()
