"""Weight schemes of compressed-tensors: how a storage dtype is described to it, in an export and in a recipe of llm-compressor."""

from __future__ import annotations

from typing import Any

from dtype_engine.core import dtypes

PER_CHANNEL = ("float8_e4m3fn", "float8_e4m3fn@tensor", "int8", "int8@tensor")
DESCRIBED = PER_CHANNEL + tuple(
    name
    for name in dtypes.BLOCK_FORMATS
    if (blocks := dtypes.BY_NAME[name].blocks) is not None and blocks.layout not in ("", "fp8")
)
"""Dtypes that compressed-tensors has a scheme for. It has one rule for MX scales, but reads what other rules gave."""


def layout(dtype: str) -> str:
    """The name of the layout that weights of one of `DESCRIBED` have in a checkpoint."""
    row = dtypes.BY_NAME[dtype]
    if row.blocks is not None:
        return row.blocks.layout
    return "int-quantized" if row.kind == "int" else "float-quantized"


def weight_scheme(dtype: str) -> dict[str, Any]:
    """compressed-tensors' arguments for the weights of one of `DESCRIBED`."""
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
