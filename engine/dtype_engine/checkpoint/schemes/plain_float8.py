"""Values in float8 that no scale belongs to, as ComfyUI stores whole models: each is the value itself, and loaders widen it."""

from __future__ import annotations

from dtype_engine.checkpoint.packed_weights import quantized_parts
from dtype_engine.checkpoint.schemes.configuration import declared
from dtype_engine.checkpoint.schemes.layout import Config, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import FP8
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    if declared(config) or any("quant" in text or "_type" in text for entry in metadata.items() for text in entry):
        return  # floats of a file that describes quantized weights may be codes
    stored = {name: tensor for name, tensor in tensors.items() if tensor.dtype in FP8}
    if stored and not quantized_parts(tensors, config):
        for name, tensor in stored.items():
            yield CodedWeight(name, tensor.shape, SCHEME, f"float8:{FP8[tensor.dtype]}", {CODES: tensor})


SCHEME = Scheme("float8", "plain_float8", _read, rank=2, fused=False)
