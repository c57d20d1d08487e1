"""Weights quantized to 8 bits by optimum-quanto. For a layer `x`, `x.weight._data` holds int8 or float8 codes, and
`x.weight._scale` holds a scale for each output channel.

Weights of 4 and 2 bits are not read, because their shape is not in the file. The file holds their codes in groups, and only the
model's code knows the shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.encoded_weight import CODES, EncodedWeight
from dtype_engine.checkpoint.schemes.scaled_codes import FLOATS, FP8

SCHEME = "quanto"
_CODES = {"int8": "int8", "float8_e4m3fnuz": "e4m3fnuz", **FP8}


def read(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any], metadata: Mapping[str, str]
) -> dict[str, EncodedWeight]:
    """Return the weights that optimum-quanto quantized, keyed by name. tensors: all tensors of the files, by name. config: the
    content of config.json. metadata: the metadata of the files' headers.
    """
    found = {}
    for name, codes in tensors.items():
        if not name.endswith("._data"):
            continue
        stem = name.removesuffix("._data")
        scale = tensors.get(f"{stem}._scale")
        if scale is None or codes.dtype not in _CODES or scale.dtype not in FLOATS:
            continue
        if len(codes.shape) < 2 or not codes.nbytes or scale.shape != (codes.shape[0], *(1 for _ in codes.shape[1:])):
            continue
        form = f"{SCHEME}:{_CODES[codes.dtype]}@channel"
        found[stem] = EncodedWeight(stem, codes.shape, SCHEME, form, {CODES: codes, "scale": scale})
    return found
