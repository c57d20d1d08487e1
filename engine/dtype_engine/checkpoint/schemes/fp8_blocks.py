"""float8 with a scale for each block, as DeepSeek publishes it and `quant_method: fp8` of transformers writes it.

`x.weight` has float8 codes, and `x.weight_scale_inv` a factor for each block of `weight_block_size`, by which codes are multiplied
in spite of its name. The last block of a row or column may be smaller. The size of a block is never derived from the number of
scales: 576 rows with 5 scales have blocks of 128 rows, not of 116.

DeepSeek-V4 calls the factors `x.scale`, and may store experts in e2m1, two values in an int8, with an exponent for every 32 values.
Its names are those of the files, as transformers renames these modules when it loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.declared import declared, sizes
from dtype_engine.checkpoint.schemes.encoded_weight import CODES, EncodedWeight
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, FP8, describe

SCHEME, DEEPSEEK = "fp8", "deepseek"
_SCALES = ("float32", "bfloat16", "float16", *EXPONENTS)
_FP4_BLOCK = (1, 32)
"""The block of DeepSeek-V4's experts, which its configuration does not name."""


def read(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any], metadata: Mapping[str, str]
) -> dict[str, EncodedWeight]:
    """Return the weights of this scheme by name. tensors: all tensors of the files, by name. config: the content of config.json.
    metadata: the metadata of the files' headers.
    """
    settings = declared(config)
    block = sizes(settings.get("weight_block_size"))
    if settings.get("quant_method") != "fp8" or block is None:
        return {}
    found = {}
    for name, scale in tensors.items():
        if name.endswith("_scale_inv"):
            stem, scheme = name.removesuffix("_scale_inv"), SCHEME
        elif name.endswith(".scale"):
            stem, scheme = name.removesuffix("scale") + "weight", DEEPSEEK
        else:
            continue
        codes = tensors.get(stem)
        if codes is None:
            continue
        weight = None
        parts = {CODES: codes, "scale": scale}
        if codes.dtype in FP8:
            weight = describe(stem, scheme, FP8[codes.dtype], codes.shape, block, parts, tensors, scales=_SCALES)
        elif (
            codes.dtype == "int8"
            and scheme == DEEPSEEK
            and "fp4" in (settings.get("expert_dtype"), config.get("expert_dtype"))
        ):
            shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else ()
            packed = {"code": "e2m1"}
            weight = describe(
                stem, scheme, "mxfp4", shape, _FP4_BLOCK, parts, tensors, scales=EXPONENTS, settings=packed
            )
        if weight is not None:
            found[stem] = weight
    return found
