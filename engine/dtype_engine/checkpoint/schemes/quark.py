"""Weights quantized by AMD Quark. `global_quant_config` has the settings of all layers. For layers whose names match a pattern,
`layer_quant_config` has other settings.

For a layer `x`, `x.weight` holds codes, and `x.weight_scale` holds their scales. These kinds of weights are read:
- int8 with a scale for the tensor or for each row;
- float8 with a scale for the tensor, for each row or for each block;
- floats of 4 and 6 bits, which are packed in bytes, with an exponent of two for each group;
- 4-bit integers in groups. The file holds the transposed weight, packed in int32 words. The eight codes of a word are in their
  own order if `pack_method` is "order", otherwise in AWQ's order.

Other integers in groups are not read.
"""

from __future__ import annotations

from msgspec.structs import replace

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import Targets, declared, mapping, size, sizes
from dtype_engine.checkpoint.schemes.layout import Config, Tensors
from dtype_engine.checkpoint.schemes.scaled_codes import EXPONENTS, FLOATS, FP8, describe, same_grid, with_beside
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Metadata, Scheme, Weights

_IN_ORDER, _REORDERED = (0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7)
_PACKED = {
    "fp4": ("mxfp4", "e2m1", 4),
    "fp6_e2m3": ("mxfp6_e2m3", "six bits", 6),
    "fp6_e3m2": ("mxfp6_e3m2", "six bits", 6),
}
"""Maps a dtype that Quark declares to (name of the format, way of packing, number of bits)."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    settings = declared(config)
    order = _IN_ORDER if mapping(settings.get("export")).get("pack_method") == "order" else _REORDERED
    if settings.get("quant_method") != "quark":
        return
    of_layers = mapping(settings.get("layer_quant_config"))
    targets = Targets(of_layers)
    for scale in tensors:
        name = scale.removesuffix("_scale")
        if name == scale or not name.endswith("weight"):
            continue
        patterns = targets.of(name.rpartition(".")[0])
        entry = of_layers[patterns[-1]] if patterns else settings.get("global_quant_config")
        yield _read_weight(name, mapping(mapping(entry).get("weight")), order, tensors)


def _read_weight(name: str, settings: Config, order: tuple[int, ...], tensors: Tensors) -> CodedWeight | None:
    """Return a weight, or None if its tensors do not fit the settings. order: the row of each of the eight codes in a word."""
    codes, scale = tensors.get(name), tensors[f"{name}_scale"]
    if codes is None or len(codes.shape) != 2:
        return None
    dtype, scheme = str(settings.get("dtype")), settings.get("qscheme")
    columns = size(settings.get("group_size"))
    block = {"per_tensor": "tensor", "per_channel": "channel", "per_block": sizes(settings.get("block_size"))}.get(
        str(scheme), None if columns is None else (1, columns)
    )
    axes = {"per_channel": (None, 0), "per_group": (None, 1, -1)}.get(str(scheme), (None, 0, 1, -1))
    if block is None or settings.get("ch_axis") not in axes:
        return None
    parts: dict[str, CheckpointTensor | None] = {CODES: codes, "scale": scale}
    if dtype in _PACKED and codes.dtype == "uint8" and scheme == "per_group":
        kind, packing, bits = _PACKED[dtype]
        shape = (codes.shape[0], codes.shape[1] * 8 // bits)
        if shape[1] % 16:
            return None
        packed = {"code": packing, "element": kind}
        return describe(name, SCHEME, kind, shape, block, parts, scales=EXPONENTS, settings=packed)
    zero = tensors.get(f"{name}_zero_point")
    if dtype in ("int4", "uint4") and codes.dtype == "int32" and scheme == "per_group" and columns is not None:
        words = {"code": "row words", "order": order, "signed": dtype == "int4"}
        shape, groups = (8 * codes.shape[1], codes.shape[0]), -(-codes.shape[0] // columns)
        if scale.shape != (groups, shape[0]) or zero is None:
            return None
        if zero.dtype != "int32" or zero.shape != (groups, codes.shape[1]):
            return None
        parts["zero_point"] = zero
        turned = replace(scale, shape=scale.shape[::-1])
        weight = describe(name, SCHEME, dtype, shape, block, {**parts, "scale": turned}, settings=words)
        return weight and replace(weight, parts={**weight.parts, "scale": scale})
    if dtype.startswith("fp8") and codes.dtype in FP8:
        return with_beside(describe(name, SCHEME, FP8[codes.dtype], codes.shape, block, parts), zero)
    if dtype == codes.dtype == "int8" and scheme != "per_group":
        if zero is not None:
            if zero.dtype not in ("int8", *FLOATS) or not same_grid(zero.shape, scale.shape):
                return None
            parts["zero_point"] = zero
        return describe(name, SCHEME, "int8", codes.shape, block, parts)
    return None


SCHEME = Scheme("quark", "block_scaled", _read, nested_settings=("global_quant_config", "weight"), ignored=("exclude",))
