"""Describes formats with codes and scales as compressed-tensors schemes, for exports and for recipes of llm-compressor."""

from __future__ import annotations

from typing import Any

from dtype_engine.core import dtypes

PER_CHANNEL = ("float8_e4m3fn", "float8_e4m3fn@tensor", "int8", "int8@tensor")
DESCRIBED = PER_CHANNEL + tuple(
    name
    for name in dtypes.STORED_FORMATS
    if (blocks := dtypes.BY_NAME[name].blocks) is not None and blocks.layout not in ("", "fp8")
)
"""Formats that a scheme can describe. MX formats with any rule for scales are among them, because a scheme does not say the rule:
compressed-tensors computes scales by one rule, and reads any scales.
"""


def layout(dtype: str) -> str:
    """Return the checkpoint layout that other programs read for weights of this dtype, such as "float-quantized", or "" if none."""
    row = dtypes.BY_NAME[dtype]
    if row.blocks is not None:
        return row.blocks.layout
    if dtype not in PER_CHANNEL:
        return ""
    return "int-quantized" if row.kind == "int" else "float-quantized"


def weight_scheme(dtype: str) -> dict[str, Any]:
    """Return the scheme's entries for weights of a dtype in `DESCRIBED`, such as `num_bits`."""
    row = dtypes.BY_NAME[dtype]
    scheme: dict[str, Any] = {"num_bits": row.bits, "type": row.kind, "symmetric": True}
    blocks = row.blocks
    if blocks is None:
        scheme["strategy"] = "tensor" if row.per_tensor else "channel"
    elif blocks.rows > 1:
        scheme |= {"strategy": "block", "block_structure": [blocks.rows, blocks.columns]}
    else:
        scheme |= {"strategy": "tensor_group" if blocks.tensor_scale else "group", "group_size": blocks.columns}
        scheme["symmetric"] = not blocks.zero_points
        if blocks.packing != "words":
            scheme["scale_dtype"] = f"torch.{blocks.scale}"
    return {**scheme, "dynamic": False}


def activation_scheme(dtype: str) -> dict[str, Any] | None:
    """Return the scheme's entries for the inputs of layers with weights of a dtype in `DESCRIBED`, or None if inputs are not
    quantized.

    The entries are those of compressed-tensors' FP8_DYNAMIC, W8A8, FP8_BLOCK, MXFP8, MXFP4 and NVFP4
    (`quantization/quant_scheme.py`). There is a scale for each token, or for each block of a token. NVFP4 also has one scale for
    all inputs of a layer, which is in the file.
    """
    row = dtypes.BY_NAME[dtype]
    if not dtypes.quantizes_activations(dtype):
        return None
    scheme: dict[str, Any] = {"num_bits": row.bits, "type": row.kind, "symmetric": True}
    blocks = row.blocks
    if blocks is None:
        return {**scheme, "strategy": "token", "dynamic": True}
    scheme |= {"strategy": "tensor_group" if blocks.tensor_scale else "group", "group_size": blocks.columns}
    if blocks.rows == 1:
        scheme["scale_dtype"] = f"torch.{blocks.scale}"
    return {**scheme, "dynamic": "local" if blocks.tensor_scale else True}


def keeps_input_scale(dtype: str) -> bool:
    """Return whether a file must hold a scale for the inputs of a layer whose weight has this format. Only NVFP4 requires one."""
    blocks = dtypes.BY_NAME[dtype].blocks
    return blocks is not None and blocks.tensor_scale and dtypes.quantizes_activations(dtype)
