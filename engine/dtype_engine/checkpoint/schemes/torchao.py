"""Weights in torchao's safetensors files. For each weight, the metadata of the file's header has the class and the attributes of
its torch tensor. `x` is a layer.

`x._weight_qdata` holds the codes of `x.weight`, and tensors such as `x._weight_scale` hold their scales. Integers of fewer than 8
bits are stored as int8. The scales of MX formats and NVFP4 may be in the order of the tensor cores (see
`runtime/formats/schemes/block_scaled.py`). `x._weight_act_pre_scale` holds a factor for each input of the layer. The layer
multiplies its inputs by these factors; here, the columns of the weight are multiplied by them instead.

`Int4Tensor` is stored in another way: `x._weight_qdata` [out, in / 2] holds two codes in a byte, and `x._weight_scale` and
`x._weight_zero_point` [groups, out] hold factors and offsets, which are added. The packings for tensor cores, such as
`Int4TilePackedTo4dTensor`, are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import block_name, mapping, sizes
from dtype_engine.checkpoint.schemes.layout import CODES_DTYPES, Config, Layout, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import FLOATS, FP8, describe
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights
from dtype_engine.checkpoint.schemes.small_tensors import json_object

_MX = {"float8_e4m3fn": "mxfp8", "float8_e5m2": "mxfp8_e5m2", "uint8": "mxfp4"}
_NAMES = tuple(f"int{bits}" for bits in range(1, 9))
_INTEGERS = ("IntxUnpackedToInt8Tensor", "Int8Tensor")


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    return (_weight(name, text, tensors) for name, text in metadata.items() if '"_type"' in text)


def _weight(name: str, text: str, tensors: Tensors) -> CodedWeight | None:
    described = json_object(text)
    kind, data = str(described.get("_type")), mapping(described.get("_data"))
    module, _, local = name.rpartition(".")
    roles = {
        CODES: "qdata", "scale": "scale", "zero_point": "zero_point", "tensor_scale": "per_tensor_scale",
        "input_scale": "act_pre_scale",
    }  # fmt: skip
    parts = {role: tensors.get(f"{module}._{local}_{end}") for role, end in roles.items()}
    own = {role: part for role, part in parts.items() if part is not None}
    if CODES not in own or "scale" not in own or len(own[CODES].shape) != 2 or not own[CODES].nbytes:
        return None
    codes, scale, zero = own[CODES], own["scale"], own.get("zero_point")
    if kind == "Int4Tensor":
        return _int4(name, data.get("block_size"), codes, scale, zero) if len(own) == 3 else None
    rows, columns = codes.shape[0], codes.shape[1] * (2 if codes.dtype == "uint8" else 1)
    block = data.get("block_size")
    if kind in ("MXTensor", "NVFP4Tensor"):
        block = [1, block]
    pair, word = sizes(block), _word(kind, data, codes, scale)
    if pair is None or word is None or columns % min(pair[1], columns):
        return None
    if zero is not None and (zero.shape != scale.shape or kind not in _INTEGERS or zero.dtype != "int8"):
        return None
    if "tensor_scale" in own and kind != "NVFP4Tensor":
        return None
    area = min(pair[0], rows), min(pair[1], columns)
    words = {(1, columns): "channel", (rows, columns): "tensor"}
    settings = {
        "swizzled": data.get("is_swizzled_scales") is True, "code": "e2m1" if codes.dtype == "uint8" else "plain",
    }  # fmt: skip
    of_area = words.get(area, area)
    return describe(name, SCHEME, word, (rows, columns), of_area, own, scales=(scale.dtype,), settings=settings)


def _int4(
    name: str, block: object, codes: CheckpointTensor, scale: CheckpointTensor, offset: CheckpointTensor | None
) -> CodedWeight | None:
    pair, (rows, columns) = sizes(block), (codes.shape[0], 2 * codes.shape[1])
    if pair is None or pair[0] != 1 or offset is None or codes.dtype not in ("int8", "uint8"):
        return None
    grid = columns // pair[1], rows
    fits = not columns % pair[1] and scale.shape == offset.shape == grid
    if not fits or not {scale.dtype, offset.dtype} <= set(FLOATS):
        return None
    parts = {CODES: codes, "scale": scale, "offset": offset}
    form = f"{SCHEME.name}:int4@{block_name(pair[1], columns)}"
    return CodedWeight(name, (rows, columns), SCHEME, form, parts, {"block": pair})


def _word(kind: str, data: Mapping[str, Any], codes: CheckpointTensor, scale: CheckpointTensor) -> str | None:
    if kind in _INTEGERS and codes.dtype == "int8" and scale.dtype in FLOATS:
        target = data.get("target_dtype")
        word = target.get("_data") if isinstance(target, Mapping) else "int8"
        return word if word in _NAMES else None
    if kind == "Float8Tensor" and scale.dtype in FLOATS:
        return FP8.get(codes.dtype)
    if kind == "MXTensor" and scale.dtype == "float8_e8m0fnu":
        return _MX.get(codes.dtype)
    if kind == "NVFP4Tensor" and (codes.dtype, scale.dtype) == ("uint8", "float8_e4m3fn"):
        return "nvfp4"
    return None


_LAYOUT = Layout(
    "quantized by torchao", "_weight_qdata", "_weight_scale", CODES_DTYPES,
    ("_weight_zero_point", "_weight_per_tensor_scale"), alone=("._weight_qdata",),
    more_scales=("_weight_per_tensor_scale",), padded=lambda codes, scale: True,
)  # fmt: skip
SCHEME = Scheme("torchao", "torchao", _read, (_LAYOUT,))
