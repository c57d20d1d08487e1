"""Single files for ComfyUI, which have no config.json.

`x.comfy_quant` describes a layer in JSON, or `_quantization_metadata` in the file's metadata describes all layers. The scales of
NVFP4 and MXFP8 are in the order of cuBLAS, and NVFP4 has the first of two values in the high bits. Older files have a tensor
`scaled_fp8` and `x.scale_weight`. Some files have neither: float8 weights with one scale each, or one for each row.

Kept apart are layers whose weights are rotated (`convrot`, `convrot_w4a4`, `asym_w4a8_int8`), and `awq_w4a16`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import declared
from dtype_engine.checkpoint.schemes.encoded_weight import CODES, EncodedWeight, read_small
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, FP8, describe

SCHEME = "comfy"
_IN_METADATA = "_quantization_metadata"
_READ = ("nvfp4", "mxfp8", "int8_tensorwise", *FP8)
"""The formats that are read."""
Tensors = Mapping[str, CheckpointTensor]


def read(tensors: Tensors, config: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, EncodedWeight]:
    """Return the weights of this scheme by name. tensors: all tensors of the files, by name. config: the content of config.json.
    metadata: the metadata of the files' headers. Raises UserError if the description of a layer can't be read.
    """
    if declared(config):
        return {}
    described = _layers(metadata)
    found = {}
    for name, codes in tensors.items():
        if not name.endswith(".weight"):
            continue
        weight = _read_weight(name, codes, _format(name, tensors, described), tensors)
        if weight is not None:
            found[name] = weight
    return found


def _read_weight(name: str, codes: CheckpointTensor, kind: str | None, tensors: Tensors) -> EncodedWeight | None:
    """Return the weight `name`, or None if its tensors do not fit. kind: the format of its layer, or None if no description names
    one.
    """
    mark = tensors.get(_mark(name))
    old = tensors.get(f"{name.removesuffix('weight')}scale_weight")
    parts = {CODES: codes, "scale": old if kind is None and old is not None else tensors.get(f"{name}_scale")}
    if parts["scale"] is None or len(codes.shape) != 2:
        return None
    rows, columns = codes.shape
    settings: dict[str, Any] = {"swizzled": True}
    if kind == "nvfp4" and codes.dtype == "uint8":
        parts["tensor_scale"] = tensors.get(f"{name}_scale_2")
        of_inputs = tensors.get(f"{name.rpartition('.')[0]}.pre_quant_scale")
        if of_inputs is not None:
            parts["input_scale"] = of_inputs
        settings |= {"code": "e2m1", "high_first": True}
        shape, of_blocks = (rows, 2 * columns), ("float8_e4m3fn",)
        return describe(
            name, SCHEME, kind, shape, (1, 16), parts, tensors, scales=of_blocks, settings=settings, beside=(mark,)
        )
    if kind == "mxfp8" and codes.dtype in FP8:
        return describe(
            name,
            SCHEME,
            kind,
            codes.shape,
            (1, 32),
            parts,
            tensors,
            scales=EXPONENTS,
            settings=settings,
            beside=(mark,),
        )
    if codes.dtype == "int8" and kind == "int8_tensorwise":
        element = "int8"
    elif codes.dtype in FP8 and kind in (None, codes.dtype):
        element = FP8[codes.dtype]
    else:
        return None
    one = describe(name, SCHEME, element, codes.shape, "tensor", parts, tensors, beside=(mark,))
    return one or describe(name, SCHEME, element, codes.shape, "channel", parts, tensors, beside=(mark,))


def in_other_format(name: str, tensors: Tensors, metadata: Mapping[str, str]) -> bool:
    """Return whether the description of a weight's layer names a format that is not read. name: the name of the weight's codes."""
    return _format(name, tensors, _layers(metadata)) not in (None, *_READ)


def _mark(name: str) -> str:
    """Return the name of the tensor that describes the layer of a weight."""
    return f"{name.removesuffix('.weight')}.comfy_quant"


def _layers(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the descriptions of layers in the metadata of a file, by the name of the layer's module. ModelOpt, which adds its own
    settings, writes such descriptions of values in another order.
    """
    layers = _object(metadata.get(_IN_METADATA, "")).get("layers") if "quantization_config" not in metadata else None
    return layers if isinstance(layers, Mapping) else {}


def _format(name: str, tensors: Tensors, described: Mapping[str, Any]) -> str | None:
    """Return the format of a weight's layer, or None without a description. A rotated weight has a format that is not read,
    whatever its name. described: the descriptions of layers in the metadata, by name.
    """
    mark, about = tensors.get(_mark(name)), described.get(name[: -len(".weight")])
    if mark is not None:
        about = _object(read_small(mark).decode(errors="replace"))
    if about is None or isinstance(about, str):
        return about
    return str(about.get("format")) if isinstance(about, Mapping) and not about.get("convrot") else "rotated"


def _object(text: str) -> dict[str, Any]:
    """Return an object from its text in JSON. A text alone is the name of a format; anything else gives {}."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {"format": found} if isinstance(found, str) else {}
