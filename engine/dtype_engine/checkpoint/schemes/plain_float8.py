"""Values in float8 that no scale belongs to, as ComfyUI stores whole models: each is the value itself, and loaders widen it."""

from __future__ import annotations

import re

from dtype_engine.checkpoint.schemes.configuration import declared
from dtype_engine.checkpoint.schemes.layout import Config, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import FP8
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights

_SCALE = re.compile(r"scale(?!_shift)|comfy_quant")
"""In the name of a tensor that turns codes of its module into values, unlike a table of scales and shifts of activations."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    if declared(config) or any("quantization" in key for key in metadata):
        return
    scales: dict[str, set[str]] = {}
    for name in tensors:
        module, _, local = name.rpartition(".")
        if _SCALE.search(local):
            scales.setdefault(module, set()).add(name)
    stored = {name: tensor for name, tensor in tensors.items() if tensor.dtype in FP8}
    if any(scales.get(name.rpartition(".")[0], set()) - {name} for name in stored):
        return
    for name, tensor in stored.items():
        yield CodedWeight(name, tensor.shape, SCHEME, f"float8:{FP8[tensor.dtype]}", {CODES: tensor})


SCHEME = Scheme("float8", "plain_float8", _read, rank=2, fused=False)
