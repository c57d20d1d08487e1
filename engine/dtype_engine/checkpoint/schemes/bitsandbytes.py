"""bitsandbytes' two formats: 4 bits with a table of values (NF4, FP4), and 8 bits with a scale for each row. `x` is a layer.

4 bits: `x.weight` holds two codes per byte, the first in the high nibble. `x.weight.quant_map` [16] holds the value of each code,
and `x.weight.absmax` a scale for each block of successive values. The JSON in `x.weight.quant_state.bitsandbytes__nf4` gives the
weight's shape and the size of a block. With "double quantization", the scales are themselves codes of 8 bits, which
`nested_quant_map`, `nested_absmax` and an offset decode.

8 bits: `x.weight`, int8 [out, in], holds the codes. `x.SCB` [out] holds the largest absolute value of each row.
"""

from __future__ import annotations

import math

from dtype_engine.checkpoint.schemes.configuration import size
from dtype_engine.checkpoint.schemes.layout import Config, Layout, PackedWeight, Shapes, Tensors
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Declared, Metadata, Scheme, Weights
from dtype_engine.checkpoint.schemes.small_tensors import json_object, read_small

_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_ROW = b"\x00"
"""The value of `weight_format` if codes are stored row by row. Other orders, for the tensor cores of old GPUs, are not read."""


def _read(tensors: Tensors, config: Config, metadata: Metadata) -> Weights:
    for name in tensors:
        if _STATE in name:
            yield _four_bits(name, tensors)
        elif name.endswith(".SCB"):
            yield _eight_bits(name, tensors)


def _four_bits(name: str, tensors: Tensors) -> CodedWeight | None:
    stem, _, kind = name.partition(_STATE)
    ends = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    parts = {role: tensors[f"{stem}.{role}"] for role in ends if f"{stem}.{role}" in tensors}
    codes, scale = tensors.get(stem), parts.get("absmax")
    if kind not in _KINDS or codes is None or scale is None:
        return None
    state = json_object(read_small(tensors[name]))
    shape, block = _shape(state.get("shape")), size(state.get("blocksize"))
    if not shape or not block:
        return None
    count = math.prod(shape)
    blocks = -(-count // block)
    settings: dict[str, int | float] = {"block": block}
    wanted: dict[str, tuple[int, ...]] = {"absmax": (blocks,), "quant_map": (16,)}
    if scale.dtype == "uint8":
        nested, offset = size(state.get("nested_blocksize")), state.get("nested_offset")
        if not nested or type(offset) is not float:
            return None
        settings |= {"nested_block": nested, "offset": offset}
        wanted |= {"nested_absmax": (-(-blocks // nested),), "nested_quant_map": (256,)}
    if (
        block % 2
        or block > _BLOCKS[-1]
        or codes.nbytes != -(-count // 2)
        or {role: part.shape for role, part in parts.items()} != wanted
    ):
        return None
    if any(part.dtype != "float32" for part in parts.values() if part.dtype != "uint8" or part is not scale):
        return None
    return CodedWeight(
        stem, shape, SCHEME, f"{SCHEME.name}:{kind}@{block}", {CODES: codes} | parts, settings, (tensors[name],)
    )


def _eight_bits(name: str, tensors: Tensors) -> CodedWeight | None:
    stem = name.removesuffix("SCB")
    codes, scale, order = tensors.get(f"{stem}weight"), tensors[name], tensors.get(f"{stem}weight_format")
    if codes is None or codes.dtype != "int8" or len(codes.shape) != 2 or scale.dtype != "float32":
        return None
    if scale.shape not in (codes.shape[:1], (*codes.shape[:1], 1)) or (order is not None and read_small(order) != _ROW):
        return None
    beside = () if order is None else (order,)
    parts = {CODES: codes, "scale": scale}
    return CodedWeight(codes.name, codes.shape, SCHEME, f"{SCHEME.name}:int8@channel", parts, beside=beside)


def _shape(found: object) -> tuple[int, ...]:
    return tuple(found) if isinstance(found, list) and all(map(size, found)) else ()


def _scale_shapes(weight: PackedWeight, tensors: Tensors, config: Config) -> Shapes:
    return tuple((-(-2 * tensors[weight.codes].nbytes // block),) for block in _BLOCKS)


_STATES = tuple(_STATE + kind for kind in _KINDS)
_MORE = (".quant_map", ".nested_absmax", ".nested_quant_map", *_STATES)
_FOUR_BITS = Layout(
    "4-bit by bitsandbytes", "", ".absmax", frozenset({"uint8", "bfloat16", "float16", "float32"}), _MORE,
    alone=(".absmax", ".quant_map"), orphans=(".absmax",), proofs=_MORE, more_scales=(".nested_absmax",),
    padded=lambda codes, scale: True, scale_shapes=_scale_shapes,
    required=lambda codes, scale: (".quant_map", *((".nested_absmax", ".nested_quant_map") if scale.dtype == "uint8" else ())),
)  # fmt: skip
_EIGHT_BITS = Layout(
    "int8 by bitsandbytes", "weight", "SCB", frozenset({"int8"}), ("weight_format",), alone=(".SCB",), orphans=(".SCB",),
    scale_shapes=lambda weight, tensors, config: (tensors[weight.codes].shape[:1],),
)  # fmt: skip
SCHEME = Scheme(
    "bnb", "bitsandbytes", _read, (_FOUR_BITS, _EIGHT_BITS), describing=(*_STATES, ".weight_format"),
    ignored=("llm_int8_skip_modules",), ignored_by=("bitsandbytes",),
    declared=Declared(lambda settings: settings.get("quant_method") == "bitsandbytes"),
)  # fmt: skip
