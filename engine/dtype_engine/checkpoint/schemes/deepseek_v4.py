"""Weights of DeepSeek-V4, which are float8 with a scale for each block, or e2m1 with an exponent of two for each group. `x` is a
layer.

`x.weight` holds the codes, and `x.scale` their scales. Experts may be stored in e2m1, with two values in an int8 and a scale for
every 32 values. Weights keep the names that they have in the files, because transformers renames these modules when it loads them.
"""

from __future__ import annotations

from dtype_engine.checkpoint.schemes.configuration import declared, quant_method
from dtype_engine.checkpoint.schemes.fp8_blocks import SCALES, block_of, input_format, scale_shapes
from dtype_engine.checkpoint.schemes.layout import FLOAT8, Config, Layout, PackedWeight, Shapes, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, FP8, describe
from dtype_engine.checkpoint.schemes.scheme import CODES, Metadata, Scheme, Weights

_FP4_BLOCK = (1, 32)
"""The (rows, columns) of a block in e2m1 experts. The configuration does not declare it."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    settings = declared(config)
    block, experts = block_of(settings), (settings.get("expert_dtype"), config.get("expert_dtype"))
    if block is None:
        return
    for name, scale in tensors.items():
        stem = f"{name.removesuffix('scale')}weight"
        codes = tensors.get(stem) if name.endswith(".scale") else None
        if codes is None:
            continue
        parts = {CODES: codes, "scale": scale}
        if codes.dtype in FP8:
            yield describe(stem, SCHEME, FP8[codes.dtype], codes.shape, block, parts, scales=SCALES)
        elif codes.dtype == "int8" and codes.shape and "fp4" in experts:
            shape, packed = (*codes.shape[:-1], 2 * codes.shape[-1]), {"code": "e2m1"}
            yield describe(stem, SCHEME, "mxfp4", shape, _FP4_BLOCK, parts, scales=EXPONENTS, settings=packed)


def _scale_shapes(weight: PackedWeight, tensors: Tensors, config: Config) -> Shapes:
    codes, method = tensors[weight.codes], quant_method(declared(config))
    if method not in ("", "fp8"):  # other programs use these names, too
        return ()
    if codes.dtype != "int8" or len(codes.shape) < 2:
        return scale_shapes(weight, tensors, config)
    return ((*codes.shape[:-1], 2 * codes.shape[-1] // _FP4_BLOCK[1]),)


_LAYOUT = Layout(
    "fp4 or fp8 with block scales (DeepSeek-V4)", "weight", "scale", FLOAT8 | {"int8"}, several=True,
    scale_shapes=_scale_shapes,
)  # fmt: skip
SCHEME = Scheme("deepseek", "block_scaled", _read, (_LAYOUT,), input_format=input_format)
