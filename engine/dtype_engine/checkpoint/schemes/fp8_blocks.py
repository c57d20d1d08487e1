"""float8 weights for which config.json declares `quant_method: fp8` or `fbgemm_fp8`. They have a scale for each block, as DeepSeek
publishes them, or a scale for each row, or a single scale. `x` is a layer.

`x.weight` holds float8 codes. If `weight_block_size` is declared, `x.weight_scale_inv` holds a scale for each block. In spite of
the name, codes are multiplied by these scales. The last block of a row or column may be smaller. The size of a block is never
derived from the number of scales: 576 rows with 5 scales have blocks of 128 rows, not of 116. If `weight_block_size` is not
declared, the scales may also be in `x.weight_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.schemes.configuration import block_in, declared, quant_method, sizes
from dtype_engine.checkpoint.schemes.layout import FLOAT8, Config, Layout, PackedWeight, Shapes, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, FLOATS, FP8, describe
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Declared, Metadata, Scheme, Weights

SCALES = (*FLOATS, *EXPONENTS)
"""The dtypes that scales may have."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    settings = declared(config)
    block = block_of(settings)
    ends = "_scale_inv" if settings.get("weight_block_size") else ("_scale", "_scale_inv")
    if block is None:
        return
    for name, scale in tensors.items():
        stem = name.removesuffix("_inv").removesuffix("_scale")
        codes = tensors.get(stem) if name.endswith(ends) else None
        if codes is not None and codes.dtype in FP8:
            parts = {CODES: codes, "scale": scale}
            yield describe(stem, SCHEME, FP8[codes.dtype], codes.shape, block, parts, scales=SCALES)


def block_of(settings: Mapping[str, Any]) -> tuple[int, int] | str | None:
    """Return what shares a scale: a block (rows, columns), "channel" for a row, or "tensor" for all. None for other methods, or if
    the declared size is invalid.
    """
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method not in ("fp8", "fbgemm_fp8"):
        return None
    return sizes(block) if block is not None else "channel" if method == "fbgemm_fp8" else "tensor"


def input_format(weight: CodedWeight, settings: Mapping[str, Any]) -> str:
    """Return the format to which runtimes round the layer's inputs, or "" (see `Scheme.input_format`)."""
    if "e4m3" not in weight.format:
        return ""
    if quant_method(settings) == "fbgemm_fp8":
        return "float8_e4m3fn"
    if settings.get("activation_scheme") == "static":
        return "float8_e4m3fn@tensor"
    if settings.get("activation_scheme") != "dynamic":
        return ""
    if weight.settings["block"] == (128, 128):
        return "fp8@128x128:ue8m0" if settings.get("scale_fmt") == "ue8m0" else "fp8@128x128"
    return "float8_e4m3fn" if weight.format.endswith(("@tensor", "@channel")) else ""


def scale_shapes(weight: PackedWeight, tensors: Tensors, config: Config) -> Shapes:
    """Return the possible shapes of the scales: one shape, with a scale for each block, or () if the weight is no matrix."""
    codes = tensors[weight.codes].shape
    if len(codes) < 2:
        return ()
    height, width = block_in(config)
    return ((*codes[:-2], -(-codes[-2] // height), -(-codes[-1] // width)),)


LAYOUT = Layout(
    "fp8 with block scales (DeepSeek)", "", "_scale_inv", FLOAT8, beside=("activation_scale", "input_scale"),
    alone=("weight_scale_inv",), orphans=("_scale_inv",), scale_shapes=scale_shapes,
)  # fmt: skip
SCHEME = Scheme(
    "fp8", "block_scaled", _read, (LAYOUT,), input_format=input_format, ignored=("modules_to_not_convert",),
    ignored_by=("fp8",), declared=Declared(needs_codes=lambda settings: quant_method(settings) == "fp8"),
)  # fmt: skip
