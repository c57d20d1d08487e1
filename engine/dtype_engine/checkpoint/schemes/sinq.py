"""Weights quantized by SINQ, which has a scale for each group and another for each column. `x` is a layer.

`x.W_q` has codes of 1 to 8 bits, packed as HQQ does it for axis 1 (see `hqq.py`). `x.meta.scale` and `x.meta.zero` [groups, 1] are
floats, and so is `x.meta.scale2` [1, in]. A value is (code - zero) * scale * scale2. Names of packings, shapes and methods of all
layers are in one JSON file (SINQ, `patch_model.py`, `save_weights_safetensors`).

By default, scales and zero points are quantized, too: `x.meta.scale` is then x * s + m, of `x.meta.scale.x` in uint8 [32, groups /
32], `x.meta.scale.s` and `x.meta.scale.m` [1, groups / 32] (`quantizer.py`, `dq8`). Of zero points, `x` is [groups, 1].

Tiles of two dimensions, NF3 and NF4, and methods without zero points (`noz`) are not read.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import block_name, mapping, size
from dtype_engine.checkpoint.schemes.hqq import PACKINGS
from dtype_engine.checkpoint.schemes.layout import BYTES, Config, Layout, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import FLOATS
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights
from dtype_engine.checkpoint.weight_files import read_json

_BESIDE = "model.safetensors.index.json.meta.json"
"""The file with the settings of all layers."""
_OTHERS = ("nf3", "nf4", "noz")
"""Parts of the names of methods whose weights are not read."""
_OF_GROUPS = ("scale", "zero")
_PACKINGS = {**PACKINGS, "5bit_32": (5, 6), "6bit_32": (6, 5)}


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    modules = [name.removesuffix(".W_q") for name in tensors if name.endswith(".W_q")]
    if not modules:
        return
    beside = tensors[f"{modules[0]}.W_q"].file.parent / _BESIDE
    layers = mapping(read_json(beside)) if beside.is_file() else {}
    for module in modules:
        yield _weight(module, mapping(mapping(layers.get(module)).get("meta")), tensors)


def _weight(module: str, settings: Config, tensors: Tensors) -> CodedWeight | None:
    codes, of_columns = tensors[f"{module}.W_q"], tensors.get(f"{module}.meta.scale2")
    rows, columns = _shape(settings.get("shape"))
    bits, together = _PACKINGS.get(str(settings.get("packing")), (0, 1))
    if of_columns is None or not (rows and columns and bits) or len(codes.shape) != 2:
        return None
    wide = codes.shape[1]
    if not wide or columns % wide or settings.get("axis") != 1 or settings.get("view_as_float"):
        return None
    groups, dtype = rows * columns // wide, "int32" if bits in (3, 5, 6) else "uint8"
    if codes.dtype != dtype or codes.shape[0] != -(-groups // together) or (dtype == "uint8" and groups % together):
        return None
    scales = {role: found for kind in _OF_GROUPS for role, found in _numbers(module, kind, groups, tensors).items()}
    if not {*_OF_GROUPS} <= scales.keys() or of_columns.shape != (1, columns) or of_columns.dtype not in FLOATS:
        return None
    method = settings.get("method")
    if not isinstance(method, str) or any(other in method.lower() for other in _OTHERS):
        return None
    parts = {CODES: codes, **scales, "column_scale": of_columns}
    form = f"{SCHEME.name}:int{bits}@{block_name(wide, columns)}"
    packing = {"bits": bits, "together": together, "axis": 1}
    return CodedWeight(f"{module}.weight", (rows, columns), SCHEME, form, parts, packing)


def _numbers(module: str, role: str, groups: int, tensors: Tensors) -> dict[str, CheckpointTensor]:
    """Return the tensors of the scales or zero points of groups, by their roles for the decoder, or {} if they do not fit. role:
    "scale" or "zero".
    """
    plain = tensors.get(f"{module}.meta.{role}")
    if plain is not None:
        return {role: plain} if plain.dtype in FLOATS and plain.shape == (groups, 1) else {}
    codes, step, low = (tensors.get(f"{module}.meta.{role}.{end}") for end in "xsm")
    if codes is None or step is None or low is None or codes.dtype != "uint8" or len(codes.shape) != 2:
        return {}
    if math.prod(codes.shape) != groups or not step.shape == low.shape == (1, codes.shape[1]):
        return {}
    found = {role: codes, f"{role}_step": step, f"{role}_low": low}
    return found if {step.dtype, low.dtype} <= {*FLOATS} else {}


def _shape(declared: Any) -> tuple[int, int]:
    """Return the (rows, columns) that the settings declare, or (0, 0) for anything else."""
    if not isinstance(declared, list) or len(declared) != 2:
        return 0, 0
    return size(declared[0]) or 0, size(declared[1]) or 0


_EIGHT_BITS = tuple(f"meta.{role}.{end}" for role in _OF_GROUPS for end in "xsm")
_LAYOUT = Layout(
    "packed by SINQ", "W_q", "meta.scale", BYTES | {"int32"}, ("meta.zero", "meta.scale2", "meta.awq_scale"),
    orphans=(".meta.scale",), more_scales=("meta.scale2",), required=lambda codes, scale: ("meta.zero", "meta.scale2"),
)  # fmt: skip
_IN_8_BITS = replace(
    _LAYOUT, scale="meta.scale.s", more=(*_EIGHT_BITS, "meta.scale2", "meta.awq_scale"), orphans=(".meta.scale.s",),
    required=lambda codes, scale: (*_EIGHT_BITS, "meta.scale2"),
)  # fmt: skip
SCHEME = Scheme(
    "sinq", "hqq", _read, (_LAYOUT, _IN_8_BITS), settings_files=(_BESIDE,), ignored=("modules_to_not_convert",),
    ignored_by=("sinq",),
)  # fmt: skip
