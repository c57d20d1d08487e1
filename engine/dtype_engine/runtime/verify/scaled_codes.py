"""Decodes weights that other programs stored as 8-bit codes with scales: value = (code - zero point) x scale, in float32.

A scale is that of the whole weight, of a row, of a group of columns in a row, or of a block whose size the configuration declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtype_engine.checkpoint import CheckpointTensor
from dtype_engine.checkpoint.packed_weights import BNB_8BIT, DEEPSEEK_V4, TORCHAO, PackedWeight

_CODES = ("float8_e4m3fn", "float8_e5m2", "int8")
_OF_ACTIVATIONS = (
    "activation_scale",
    "input_scale",
    "output_scale",
    "scale_input",
    "input_zero_point",
    "weight_format",
)
"""Ends of names such as `input_scale`. Tensors with these names are stored together with a quantised weight, but do not change its
values.
"""
_ZERO_POINT = "_zero_point"


def decoder(
    weight: PackedWeight,
    tensors: Mapping[str, CheckpointTensor],
    config: Mapping[str, Any] | None,
    read: Callable[[str], torch.Tensor],
) -> Callable[[], torch.Tensor] | None:
    """Return a function that decodes a weight to float32 [out, in], or None if the weight is not stored as 8-bit codes with scales.

    tensors: the tensors of the files. config: the contents of config.json. read: a function that reads a tensor of the files by its
    name.
    """
    codes, scale = tensors[weight.codes], tensors[weight.scale]
    parts = {name for name in weight.names if name in tensors} - {weight.codes, weight.scale}
    zeros = [name for name in parts if name.endswith(_ZERO_POINT) and not name.endswith(_OF_ACTIVATIONS)]
    if (
        len(codes.shape) != 2
        or 0 in codes.shape
        or codes.dtype not in _CODES
        or (weight.layout is DEEPSEEK_V4 and codes.dtype == "int8")  # two codes a byte
        or (weight.layout is TORCHAO and scale.dtype == "float8_e8m0fnu")  # in the order of tensor cores
        or not all(name.endswith(_OF_ACTIVATIONS) or name in zeros for name in parts)
    ):
        return None
    block = _block(codes.shape, scale.shape, _declared_block(config))
    if block is None or any(tensors[name].shape != scale.shape for name in zeros):
        return None
    divisor = 127.0 if weight.layout is BNB_8BIT else 1.0

    def decode() -> torch.Tensor:
        values = read(weight.codes).to(torch.float32)
        for name in zeros:
            values -= _spread(read(name).to(torch.float32), codes.shape, block)
        stored = read(weight.scale)
        # A byte as a scale is an exponent of two (E8M0), of which safetensors once had no dtype.
        scales = torch.exp2(stored.to(torch.float32) - 127) if stored.dtype == torch.uint8 else stored.to(torch.float32)
        return values * _spread(scales, codes.shape, block) / divisor

    return decode


def _declared_block(config: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return the block size [rows, columns] in a quantisation configuration, or () if it declares none."""
    declared = _mapping((config or {}).get("quantization_config"))
    schemes = [_mapping(_mapping(group).get("weights")) for group in _mapping(declared.get("config_groups")).values()]
    sizes = [declared.get("weight_block_size"), *(scheme.get("block_structure") for scheme in schemes)]
    for size in sizes:
        if isinstance(size, (list, tuple)) and len(size) == 2 and all(type(each) is int and each > 0 for each in size):
            return tuple(size)
    return ()


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a mapping, and otherwise an empty mapping, since a configuration file may have anything there."""
    return value if isinstance(value, Mapping) else {}


def _block(codes: tuple[int, ...], scales: tuple[int, ...], declared: tuple[int, ...]) -> tuple[int, int] | None:
    """Return how many rows and columns of the codes share one scale, or None if the shape of the scales fits no such block.

    codes: the shape of the codes, [out, in]. scales: the shape of the scales. declared: the block size in the configuration, or ().
    """
    rows, columns = codes
    if math.prod(scales) == 1:
        return rows, columns
    if scales in ((rows,), (rows, 1)):
        return 1, columns
    if len(declared) == 2 and scales == tuple(-(-extent // size) for extent, size in zip(codes, declared, strict=True)):
        return declared[0], declared[1]
    if len(scales) == 2 and scales[0] == rows and scales[1] and columns % scales[1] == 0:
        return 1, columns // scales[1]
    return None


def _spread(scales: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """Repeat scales so that they can be multiplied with codes of `shape`. block: how many rows and columns of the codes share a
    scale; the last blocks may be shorter.
    """
    wide = scales.reshape(-(-shape[0] // block[0]), -1)
    if len(wide) > 1 and block[0] > 1:
        wide = wide.repeat_interleave(block[0], 0)[: shape[0]]
    return wide if wide.shape[1] == 1 else wide.repeat_interleave(block[1], 1)[:, : shape[1]]
