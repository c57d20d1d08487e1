"""Weights quantized by msModelSlim for Ascend (its format AscendV1, `modelslim_v1/save/ascendv1.py`). `x` is a layer.

A JSON file beside the weights gives the type of each tensor, such as "W8A8_DYNAMIC". Codes are in `x.weight`: int8, also for
integers of 4 bits of W4A4, or float8_e4m3fn. A value is (code - offset) * scale, of `x.weight_scale` and `x.weight_offset` [out,
groups], with one group unless the type allows several. MXFP8 has exponents of two, plus 127, in `x.weight_scale` [out, in / 32].

Static W8A8 has no scale of the weight: `x.deq_scale` [out] is its product with `x.input_scale`. It is float32, or for models in
float16 the bits of float32 in int64. `x.quant_bias` holds the bias as int32, less what the offset of inputs adds.

Types whose codes are packed (W4A8_DYNAMIC, MXFP4), and models that rotate activations (QuaRot) are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import mapping
from dtype_engine.checkpoint.schemes.layout import Config, Layout, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, FLOATS, describe, same_grid, with_beside
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights
from dtype_engine.checkpoint.weight_files import read_json

_FILE = "quant_model_description"
_BESIDE = (f"{_FILE}.json", *(f"{_FILE}_{kind}.json" for kind in ("w8a8", "w8a8s", "w8a16", "w8a8_dynamic")))
"""The names of the file that gives the types of tensors. Old versions add the type of the model."""
_OTHERS = ("input_scale", "input_offset", "deq_scale", "quant_bias")
"""Tensors of a layer's inputs and results."""


class _Type(msgspec.Struct, frozen=True):
    """How weights of one type are stored."""

    code: str = "int8"
    """The type of codes in the names of formats."""
    dtype: str = "int8"
    scales: tuple[str, ...] = FLOATS
    block: int | None = None
    """The columns of a group, None if the shape of the scales tells it."""
    static: bool = False
    """Whether `deq_scale` is the only scale."""


_INTEGERS, _STATIC = _Type(), _Type(scales=("float32", "int64"), static=True)
_TYPES = {
    **dict.fromkeys(("W8A16", "W8A8_DYNAMIC", "W8A8_MIX"), _INTEGERS),
    **dict.fromkeys(("W8A8", "W8A8S"), _STATIC),
    "W4A4_DYNAMIC": _Type("int4"),
    "WFP8AFP8_DYNAMIC": _Type("e4m3", "float8_e4m3fn"),
    "W8A8_MXFP8": _Type("mxfp8", "float8_e4m3fn", EXPONENTS[:1], 32),
}


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    for name, kind in _types(tensors).items():
        if name in tensors and kind in _TYPES and name.endswith(".weight"):
            yield _weight(name, _TYPES[kind], tensors)


def _types(tensors: Tensors) -> Mapping[str, str]:
    """Return the types of tensors by name, {} if no file gives them, or if activations are rotated. Raises UserError if the file
    can't be read.
    """
    folders = {tensor.file.parent for tensor in islice(tensors.values(), 1)}
    found = (folder / name for folder in folders for name in _BESIDE if (folder / name).is_file())
    described = {} if (beside := next(found, None)) is None else read_json(beside)
    if "quarot" in mapping(described.get("metadata")):
        return {}
    return {name: kind for name, kind in described.items() if isinstance(kind, str)}


def _weight(name: str, kind: _Type, tensors: Tensors) -> CodedWeight | None:
    codes, module = tensors[name], name.removesuffix("weight")
    if codes.dtype != kind.dtype or len(codes.shape) != 2:
        return None
    scale = tensors.get(f"{module}deq_scale" if kind.static else f"{name}_scale")
    parts: dict[str, CheckpointTensor | None] = {CODES: codes, "scale": scale}
    settings: dict[str, Any] = {}
    block: tuple[int, int] | str = "channel"
    if kind.static:
        parts["tensor_scale"], settings["divide"] = tensors.get(f"{module}input_scale"), True
    elif kind.block is not None:
        block = (1, kind.block)
    elif scale is not None and len(scale.shape) == 2 and scale.shape[1] > 1:
        if codes.shape[1] % scale.shape[1]:
            return None
        block = (1, codes.shape[1] // scale.shape[1])
    if not kind.static and kind.block is None:
        parts["zero_point"] = offset = tensors.get(f"{name}_offset")
        if scale is None or offset is None or offset.dtype not in FLOATS or not same_grid(offset.shape, scale.shape):
            return None
    weight = describe(name, SCHEME, kind.code, codes.shape, block, parts, scales=kind.scales, settings=settings)
    held = [part.name for part in parts.values() if part is not None]
    return with_beside(weight, *(tensors.get(module + end) for end in _OTHERS if module + end not in held))


def _in_other_types(names: Iterable[str], tensors: Tensors, metadata: Metadata) -> set[str]:
    types = _types(tensors) if (names := tuple(names)) else {}
    return {name for name in names if name in types and types[name] not in _TYPES}


_LAYOUT = Layout(
    "quantized by msModelSlim", "weight", "deq_scale", frozenset({"int8"}), ("input_scale", "input_offset", "quant_bias"),
    orphans=(".deq_scale",), required=lambda codes, scale: ("input_scale",),
)  # fmt: skip
SCHEME = Scheme(
    "modelslim", "block_scaled", _read, (_LAYOUT,), beside=(), settings_files=_BESIDE, left_out=_in_other_types
)
