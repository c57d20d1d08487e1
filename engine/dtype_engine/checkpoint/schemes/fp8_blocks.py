"""float8 with a scale for each block, as DeepSeek publishes it and `quant_method: fp8` of transformers writes it.

`x.weight` has float8 codes, and `x.weight_scale_inv` a factor for each block of `weight_block_size`, by which codes are multiplied
in spite of its name. The last block of a row or column may be smaller. The size of a block is never derived from the number of
scales: 576 rows with 5 scales have blocks of 128 rows, not of 116.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.encoded_weight import CODES, EncodedWeight

SCHEME = "fp8"
_CODES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


def read(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any], metadata: Mapping[str, str]
) -> dict[str, EncodedWeight]:
    """Return the weights of this scheme by name. tensors: all tensors of the files, by name. config: the content of config.json.
    metadata: the metadata of the files' headers.
    """
    declared = config.get("quantization_config")
    declared = declared if isinstance(declared, Mapping) else {}
    block = _block(declared.get("weight_block_size"))
    if declared.get("quant_method") != "fp8" or block is None:
        return {}
    found = {}
    for name, scale in tensors.items():
        stem = name.removesuffix("_scale_inv")
        codes = tensors.get(stem)
        if stem == name or codes is None or codes.dtype not in _CODES or scale.dtype not in _SCALES:
            continue
        if len(codes.shape) != 2 or scale.shape != tuple(
            -(-extent // size) for extent, size in zip(codes.shape, block, strict=True)
        ):
            continue
        module = stem.rpartition(".")[0]
        beside = (tensors.get(f"{module}.activation_scale"), tensors.get(f"{module}.input_scale"))
        found[stem] = EncodedWeight(
            stem,
            codes.shape,
            SCHEME,
            f"{SCHEME}:{_CODES[codes.dtype]}@{block[0]}x{block[1]}",
            {CODES: codes, "scale": scale},
            {"block": block},
            tuple(tensor for tensor in beside if tensor is not None),
        )
    return found


def _block(declared: object) -> tuple[int, int] | None:
    """Return the size of a block as (rows, columns), or None if `weight_block_size` is not such a pair."""
    if (
        not isinstance(declared, list)
        or len(declared) != 2
        or any(type(size) is not int or size < 1 for size in declared)
    ):
        return None
    return declared[0], declared[1]
