"""Quantized weights in single files for ComfyUI, which have no config.json.

Current files describe how a layer `x` is quantized, in JSON in a tensor `x.comfy_quant`, or in the header's metadata under
`_quantization_metadata`. The block scales of NVFP4 and MXFP8 are in the order in which cuBLAS reads them (see
`runtime/formats/schemes/block_scaled.py`). NVFP4 has two codes per byte, the first in the high bits.

Older files have no descriptions. They have a tensor `scaled_fp8`, which is kept beside the first weight, and their scales are in
`x.scale_weight`. In files with neither, weights are float8, with one scale for the tensor or one for each row.

int8 weights may be rotated (`convrot`): each group of columns was multiplied by a Hadamard matrix, which is its own inverse.

The formats of 4 bits (comfy-kitchen, `tensor/`) have two codes per byte, the first in the low bits:

- `convrot_w4a4`: signed integers with a scale for each row, rotated.
- `awq_w4a16`: unsigned integers, from which 8 is subtracted. `x.weight_scale` [groups, out] and `x.weight_zeros`, which is added
  after the scale.
- `asym_w4a8_int8`: indices to the 16 values in `x.weight_codebook`, or without it integers plus 8. A value times its group's scale
  (`x.weight_s_rel`, float8_e4m3fn [out, groups]) is rounded to int8 and multiplied by the row's scale (`x.weight_s_channel`). It
  is rotated. Codes may have 6 bits: integers plus 32, whose two high bits follow the row's low bits, four in a byte. Weights with
  a `x.weight_correction` are not read, because ComfyUI ignores this tensor, and comfy-kitchen does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.compressed_tensors import SCALED
from dtype_engine.checkpoint.schemes.configuration import declared, mapping, size
from dtype_engine.checkpoint.schemes.layout import FLOAT8, Config, Layout, PackedWeight, Shapes, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, FLOATS, FP8, describe, with_beside
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights
from dtype_engine.checkpoint.schemes.small_tensors import read_small

_MARK, _OLD_MARK = "comfy_quant", "scaled_fp8"
_IN_METADATA = "_quantization_metadata"
_ROTATIONS = (4, 16, 64, 256, 1024, 4096)


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    if declared(config):
        return
    described = _layers(metadata)
    mark = next((tensor for name, tensor in tensors.items() if name.rpartition(".")[2] == _OLD_MARK), None)
    for name, codes in tensors.items():
        if name.endswith(".weight"):
            weight = _weight(name, codes, _about(name, tensors, described), tensors)
            if weight is not None and mark is not None:
                weight, mark = replace(weight, beside=(*weight.beside, mark)), None
            yield weight


def _weight(
    name: str, codes: CheckpointTensor, about: Mapping[str, Any] | None, tensors: Tensors
) -> CodedWeight | None:
    read = _IN_NIBBLES.get(str(about.get("format"))) if about is not None else None
    if read is None or about is None:
        return _plain_or_fp4(name, codes, about, tensors)
    if len(codes.shape) != 2 or codes.dtype != "int8":
        return None
    return with_beside(read(name, codes, about, tensors), tensors.get(_mark(name)))


def _rows_of_int4(name: str, codes: CheckpointTensor, about: Mapping[str, Any], tensors: Tensors) -> CodedWeight | None:
    shape = (codes.shape[0], 2 * codes.shape[1])
    settings = {"code": "int4 pairs", "rotation": _rotation(about, shape[1])}
    parts = {CODES: codes, "scale": tensors.get(f"{name}_scale")}
    described = describe(name, SCHEME, "rotated_int4", shape, "channel", parts, settings=settings)
    return described if settings["rotation"] else None


def _int4_with_offsets(
    name: str, codes: CheckpointTensor, about: Mapping[str, Any], tensors: Tensors
) -> CodedWeight | None:
    rows, columns = shape = (codes.shape[0], 2 * codes.shape[1])
    scale, offset = tensors.get(f"{name}_scale"), tensors.get(f"{name}_zeros")
    if scale is None or offset is None or not scale.nbytes or not columns:
        return None
    grid = (scale.shape[0], rows)
    if not (scale.shape == offset.shape == grid and {scale.dtype, offset.dtype} <= {*FLOATS}) or columns % grid[0]:
        return None
    group = columns // grid[0]
    if about.get("group_size", group) != group:
        return None
    parts = {CODES: codes, "scale": scale, "offset": offset}
    return CodedWeight(name, shape, SCHEME, f"{SCHEME.name}:uint4@g{group}", parts, {"layout": "offsets"})


def _on_int8_grid(name: str, codes: CheckpointTensor, about: Mapping[str, Any], tensors: Tensors) -> CodedWeight | None:
    scale, of_rows, table = (tensors.get(f"{name}_{end}") for end in ("s_rel", "s_channel", "codebook"))
    group = size(about.get("group_size", 16))
    if not group or scale is None or len(scale.shape) != 2 or f"{name}_correction" in tensors:
        return None
    rows, columns = shape = (codes.shape[0], group * scale.shape[1])
    if of_rows is None or of_rows.shape != (rows,) or of_rows.dtype not in FLOATS:
        return None
    bits = next((bits for bits in (4, 6) if columns % 4 == 0 and codes.shape[1] * 8 == columns * bits), None)
    if bits is None or (table is not None and (bits != 4 or table.shape != (16,) or table.dtype not in FLOATS)):
        return None
    settings = {"layout": "int8 grid", "bits": bits, "rotation": _rotation(about, columns)}
    parts = {CODES: codes, "scale": scale, "row_scale": of_rows} | ({} if table is None else {"table": table})
    kind = f"rotated_int{bits}{'_codebook' * (table is not None)}"
    block, scales = (1, group), ("float8_e4m3fn", "uint8")
    described = describe(name, SCHEME, kind, shape, block, parts, scales=scales, settings=settings)
    return described if settings["rotation"] else None


_IN_NIBBLES: Mapping[str, Callable[[str, CheckpointTensor, Mapping[str, Any], Tensors], CodedWeight | None]] = {
    "convrot_w4a4": _rows_of_int4,
    "awq_w4a16": _int4_with_offsets,
    "asym_w4a8_int8": _on_int8_grid,
}
"""For each format whose bytes hold codes of 4 bits: a function of (name, codes, description of the layer, all tensors) that returns
the weight, or None if its tensors do not fit together.
"""
_READ = ("nvfp4", "mxfp8", "int8_tensorwise", *FP8, *_IN_NIBBLES)


def _rotation(about: Mapping[str, Any], columns: int) -> int:
    """Return how many columns of a rotated weight were multiplied by a Hadamard matrix together, or 0 if no such matrix fits."""
    wide = size(about.get("convrot_groupsize", 256))
    return wide if wide in _ROTATIONS and columns % wide == 0 else 0


def _plain_or_fp4(
    name: str, codes: CheckpointTensor, about: Mapping[str, Any] | None, tensors: Tensors
) -> CodedWeight | None:
    kind = None if about is None else about.get("format")
    mark = tensors.get(_mark(name))
    old = tensors.get(f"{name.removesuffix('weight')}scale_weight")
    parts = {CODES: codes, "scale": old if about is None and old is not None else tensors.get(f"{name}_scale")}
    if parts["scale"] is None or len(codes.shape) != 2 or (about is not None and not _is_read(about)):
        return None
    rows, columns = shape = codes.shape
    settings: dict[str, Any] = {"swizzled": True}
    if kind == "nvfp4" and codes.dtype == "uint8":
        parts["tensor_scale"] = tensors.get(f"{name}_scale_2")
        of_inputs = tensors.get(f"{name.rpartition('.')[0]}.pre_quant_scale")
        if of_inputs is not None:
            parts["input_scale"] = of_inputs
        settings |= {"code": "e2m1", "high_first": True}
        scales, shape = ("float8_e4m3fn",), (rows, 2 * columns)
        return with_beside(describe(name, SCHEME, kind, shape, (1, 16), parts, scales=scales, settings=settings), mark)
    if kind == "mxfp8" and codes.dtype in FP8:
        weight = describe(name, SCHEME, kind, shape, (1, 32), parts, scales=EXPONENTS, settings=settings)
        return with_beside(weight, mark)
    settings = {}
    if codes.dtype == "int8" and kind == "int8_tensorwise":
        element = "int8"
        if about is not None and about.get("convrot"):
            element, settings["rotation"] = "rotated_int8", _rotation(about, columns)
            if not settings["rotation"]:
                return None
    elif codes.dtype in FP8 and kind in (None, codes.dtype):
        element = FP8[codes.dtype]
    else:
        return None
    for block in ("tensor", "channel"):
        weight = with_beside(describe(name, SCHEME, element, shape, block, parts, settings=settings), mark)
        if weight is not None:
            return weight
    return None


def _is_read(about: Mapping[str, Any]) -> bool:
    return about.get("format") in (("int8_tensorwise", *_IN_NIBBLES) if about.get("convrot") else _READ)


def _in_other_formats(names: Iterable[str], tensors: Tensors, metadata: Mapping[str, str]) -> set[str]:
    """Return those of `names` whose layers' descriptions give a format that is not read."""
    described = _layers(metadata)
    about = {name: _about(name, tensors, described) for name in names}
    return {name for name, layer in about.items() if layer is not None and not _is_read(layer)}


def _mark(name: str) -> str:
    return f"{name.removesuffix('.weight')}.{_MARK}"


def _layers(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the descriptions of layers in the metadata, by module. {} for ModelOpt's files, in which the same descriptions mean
    another order of the scales.
    """
    layers = _object(metadata.get(_IN_METADATA, "")).get("layers") if "quantization_config" not in metadata else None
    return layers if isinstance(layers, Mapping) else {}


def _about(name: str, tensors: Tensors, described: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the description of a weight's layer, from a tensor `x.comfy_quant` or else the metadata (`described`), or None."""
    mark, about = tensors.get(_mark(name)), described.get(name[: -len(".weight")])
    if mark is not None:
        about = _object(read_small(mark).decode(errors="replace"))
    if isinstance(about, str):
        return {"format": about}
    return {**mapping(about.get("params")), **about} if isinstance(about, Mapping) else None


def _object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text, or {"format": "nvfp4"} for the string "nvfp4", and {} for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {"format": found} if isinstance(found, str) else {}


def _scale_shapes(weight: PackedWeight, tensors: Tensors, config: Config) -> Shapes:
    rows = tensors[weight.codes].shape[:1]
    return ((), (1,), rows, (*rows, 1))


_DESCRIBED = replace(
    SCALED, more=(*SCALED.more, "_zeros"), beside=(*SCALED.beside, _MARK), mark=_MARK, padded=lambda codes, scale: True,
    scale_shapes=lambda weight, tensors, config: (),  # these are in the order of the tensor cores, and padded
)  # fmt: skip
_ON_INT8_GRID = Layout(
    "int4 with scales (ComfyUI)", "", "_s_rel", frozenset({"int8"}), ("_s_channel", "_codebook", "_correction"), (_MARK,),
    orphans=("weight_s_rel",), required=lambda codes, scale: ("_s_channel",), several=True,
)  # fmt: skip
_OLD = Layout(
    "fp8 with scales (ComfyUI)", "weight", "scale_weight", FLOAT8, ("scale_input",), alone=(".scale_weight", _OLD_MARK),
    orphans=(".scale_weight",), padded=lambda codes, scale: True, scale_shapes=_scale_shapes,
)  # fmt: skip
SCHEME = Scheme(
    "comfy", "comfy", _read, (_DESCRIBED, _ON_INT8_GRID, _OLD), describing=(f".{_MARK}",), fused=False, left_out=_in_other_formats,
    rank=1,  # its files have no configuration, and all other schemes are recognized by more
)  # fmt: skip
