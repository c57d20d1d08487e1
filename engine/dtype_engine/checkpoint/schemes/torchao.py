"""torchao's safetensors: the metadata of a file's header describes each weight by the class and attributes of its torch tensor.

`x._weight_qdata` holds the codes of `x.weight`, and `x._weight_scale`, `x._weight_zero_point`, ... what belongs to them. Integers
of fewer than 8 bits are stored as int8. Scales of MX formats and NVFP4 may be in the order of the tensor cores (see
`runtime/formats/schemes/swizzled.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.declared import FLOATS
from dtype_engine.checkpoint.schemes.encoded_weight import CODES, EncodedWeight

SCHEME = "torchao"
_FLOAT8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_MX = {"float8_e4m3fn": "mxfp8", "float8_e5m2": "mxfp8_e5m2", "uint8": "mxfp4"}
_NAMES = tuple(f"int{bits}" for bits in range(1, 9))
_INTEGERS = ("IntxUnpackedToInt8Tensor", "Int8Tensor")


def read(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any], metadata: Mapping[str, str]
) -> dict[str, EncodedWeight]:
    """Return the weights of this scheme by name. tensors: all tensors of the files, by name. config: the content of config.json.
    metadata: the metadata of the files' headers.
    """
    found = (_weight(name, text, tensors) for name, text in metadata.items() if '"_type"' in text)
    return {weight.name: weight for weight in found if weight is not None}


def _weight(name: str, text: str, tensors: Mapping[str, CheckpointTensor]) -> EncodedWeight | None:
    kind, data = _description(text)
    module, _, local = name.rpartition(".")
    roles = {CODES: "qdata", "scale": "scale", "zero": "zero_point", "global_scale": "per_tensor_scale"}
    parts = {role: tensors.get(f"{module}._{local}_{end}") for role, end in roles.items()}
    own = {role: part for role, part in parts.items() if part is not None}
    if CODES not in own or "scale" not in own or len(own[CODES].shape) != 2 or not own[CODES].nbytes:
        return None
    codes, scale = own[CODES], own["scale"]
    rows, columns = codes.shape[0], codes.shape[1] * (2 if codes.dtype == "uint8" else 1)
    block = data.get("block_size")
    if kind in ("MXTensor", "NVFP4Tensor"):
        block = [1, block]
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        return None
    high, wide = min(block[0], rows), min(block[1], columns)
    grid = (-(-rows // high), columns // wide)
    swizzled = data.get("is_swizzled_scales") is True
    stored = (-(-grid[0] // 128) * 32, -(-grid[1] // 4) * 16) if swizzled else grid
    single = scale.shape in ((), (1,)) and grid == (1, 1)
    word = _word(kind, data, codes, scale)
    if word is None or columns % wide or (scale.shape != stored and not single):
        return None
    if "zero" in own and (own["zero"].shape != scale.shape or kind not in _INTEGERS or own["zero"].dtype != "int8"):
        return None
    if "global_scale" in own and (own["global_scale"].shape not in ((), (1,)) or kind != "NVFP4Tensor"):
        return None
    return EncodedWeight(
        name, (rows, columns), SCHEME, f"{SCHEME}:{word}{_block_words(kind, (high, wide), (rows, columns))}", own,
        {"block": (high, wide), "swizzled": swizzled},
    )  # fmt: skip


def _word(kind: str, data: Mapping[str, Any], codes: CheckpointTensor, scale: CheckpointTensor) -> str | None:
    """Return the name of the type of codes, or None if the dtypes of codes and scales don't belong to the tensor's class."""
    if kind in _INTEGERS and codes.dtype == "int8" and scale.dtype in FLOATS:
        target = data.get("target_dtype")
        word = target.get("_data") if isinstance(target, Mapping) else "int8"
        return word if word in _NAMES else None
    if kind == "Float8Tensor" and scale.dtype in FLOATS:
        return _FLOAT8.get(codes.dtype)
    if kind == "MXTensor" and scale.dtype == "float8_e8m0fnu":
        return _MX.get(codes.dtype)
    if kind == "NVFP4Tensor" and (codes.dtype, scale.dtype) == ("uint8", "float8_e4m3fn"):
        return "nvfp4"
    return None


def _block_words(kind: str, block: tuple[int, int], shape: tuple[int, int]) -> str:
    """Return the name of a block, such as "@g128", or "" if the name of the type implies it."""
    if kind in ("MXTensor", "NVFP4Tensor"):
        return ""
    if block == shape:
        return "@tensor"
    if block[0] == 1:
        return "@channel" if block[1] == shape[1] else f"@g{block[1]}"
    return f"@{block[0]}x{block[1]}"


def _description(text: str) -> tuple[str, Mapping[str, Any]]:
    """Return the class of a tensor and its attributes, or ("", {}) if a text of the metadata does not describe a tensor."""
    try:
        described = json.loads(text)
    except (ValueError, RecursionError):
        return "", {}
    data = described.get("_data") if isinstance(described, Mapping) else None
    return (str(described.get("_type")), data) if isinstance(data, Mapping) else ("", {})
