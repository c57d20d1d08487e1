"""float8 weights for which config.json declares `quant_method: fp8` or `fbgemm_fp8`. They have a scale for each block, as DeepSeek
publishes them, or a scale for each row, or a single scale. `x` is a layer.

`x.weight` holds float8 codes. If `weight_block_size` is declared, `x.weight_scale_inv` holds a scale for each block. In spite of
its name, codes are multiplied by it. The last block of a row or column may be smaller. The size of a block is never derived from
the number of scales: 576 rows with 5 scales have blocks of 128 rows, not of 116. If `weight_block_size` is not declared, the scales
may also be in `x.weight_scale`.

DeepSeek-V4 calls the scales `x.scale`. It may store experts in e2m1, with two values in an int8 and an exponent of two for every 32
values. Its weights keep the names that they have in the files, because transformers renames these modules when it loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import declared, sizes
from dtype_engine.checkpoint.schemes.encoded_weight import CODES, EncodedWeight
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, FLOATS, FP8, describe

SCHEME, DEEPSEEK = "fp8", "deepseek"
_SCALES = (*FLOATS, *EXPONENTS)
_FP4_BLOCK = (1, 32)
"""The (rows, columns) of a block in the experts of DeepSeek-V4, whose configuration does not declare them."""


def read(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any], metadata: Mapping[str, str]
) -> dict[str, EncodedWeight]:
    """Return the weights that are stored as float8 codes with scales, as DeepSeek does, keyed by name. tensors: all tensors of the
    files, by name. config: the content of config.json. metadata: the metadata of the files' headers.
    """
    settings = declared(config)
    method, declared_block = settings.get("quant_method"), settings.get("weight_block_size")
    block = sizes(declared_block) if declared_block is not None else "channel" if method == "fbgemm_fp8" else "tensor"
    if method not in ("fp8", "fbgemm_fp8") or block is None:
        return {}
    found = {}
    ends = (".scale", "_scale_inv") if declared_block else (".scale", "_scale", "_scale_inv")
    for name, scale in tensors.items():
        if not name.endswith(ends):
            continue
        stem, scheme = name.removesuffix("_inv").removesuffix("_scale"), SCHEME
        if name.endswith(".scale"):
            stem, scheme = name.removesuffix("scale") + "weight", DEEPSEEK
        codes = tensors.get(stem)
        if codes is None:
            continue
        parts, experts = {CODES: codes, "scale": scale}, (settings.get("expert_dtype"), config.get("expert_dtype"))
        weight = None
        if codes.dtype in FP8:
            weight = describe(stem, scheme, FP8[codes.dtype], codes.shape, block, parts, scales=_SCALES)
        elif scheme == DEEPSEEK and codes.dtype == "int8" and codes.shape and "fp4" in experts:
            shape, packed = (*codes.shape[:-1], 2 * codes.shape[-1]), {"code": "e2m1"}
            weight = describe(stem, scheme, "mxfp4", shape, _FP4_BLOCK, parts, scales=EXPONENTS, settings=packed)
        if weight is not None:
            found[stem] = weight
    return found
