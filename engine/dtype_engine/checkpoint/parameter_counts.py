"""Computes how many parameters each tensor of a quantised weight represents, from names, shapes and the configuration.

How parameters are packed depends on the layout; the layouts and their sources are those of `packed_weights`. If a configuration
lists several pairs of bit width and group size, the pair that agrees with the number of scales is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Literal

from dtype_engine.checkpoint.packed_weights import (
    BNB_4BIT,
    COMPRESSED,
    DEEPSEEK_V4,
    GPT_OSS,
    GPTQ,
    HQQ,
    MLX,
    SCALED,
    TORCHAO,
    PackedWeight,
    Stored,
    packed_weights,
)

Count = int | Literal["unknown"] | None
"""The number of parameters that a tensor represents, or "unknown". None means one parameter for each element of the tensor."""


def parameters_meant(
    tensors: Mapping[str, Stored], parts: Iterable[str], config: Mapping[str, Any] | None = None
) -> dict[str, Count]:
    """Return the number of parameters that each tensor of a quantised weight represents, keyed by tensor name. The codes represent
    all parameters of the weight, so the number is 0 for its other tensors, such as scales and zero points.

    parts: the names of the tensors to count, which all belong to quantised weights. tensors: all tensors of the file, with the
    shapes that they have in it. config: the content of config.json.
    """
    counts: dict[str, Count] = dict.fromkeys(parts, 0)
    for weight in packed_weights(tensors):
        if weight.codes in counts:
            counts[weight.codes] = _count(weight, tensors, config or {})
    for name in counts:  # codes whose scales are missing
        if name.endswith((".qweight", ".weight_packed", ".W_q")) and counts[name] == 0:
            counts[name] = "unknown"
    return counts


def _count(weight: PackedWeight, tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> Count:
    layout, codes, scale = weight.layout, tensors[weight.codes], tensors[weight.scale]
    size = prod(codes.shape)
    if layout is GPTQ:
        zeros = tensors.get(weight.part("qzeros"))
        if zeros is not None and zeros.shape[-1:] != (0,) and len(scale.shape) == 2:
            return size * scale.shape[-1] // zeros.shape[-1]  # both are packed alike, and scales are not packed
        return _of_words(size, 32, _bits(config))
    if layout is MLX:
        return _mlx_count(weight, codes, scale, config)
    if layout is COMPRESSED:
        return _compressed_count(codes, scale, config)
    if layout is HQQ:
        return _of_words(size, 8 * (4 if codes.dtype.endswith("32") else 1), _bits(config))
    if layout in (BNB_4BIT, GPT_OSS):
        return 2 * size
    if layout is TORCHAO:
        return 2 * size if codes.dtype == "uint8" else None
    if layout is DEEPSEEK_V4:
        halves = codes.dtype == "int8" and 2 * _last(codes) == 32 * _last(scale)
        return 2 * size if halves else None
    if codes.dtype == "uint8":
        in_pairs = weight.part("_scale_2") in tensors or (
            layout is SCALED and len(scale.shape) == 2 and scale.shape[0] == 2 * codes.shape[0]
        )
        return 2 * size if in_pairs else "unknown"
    return None


def _of_words(size: int, width: int, bits: int | None) -> Count:
    return size * width // bits if bits else "unknown"


def _last(tensor: Stored) -> int:
    return tensor.shape[-1] if tensor.shape else 1


def _mlx_count(weight: PackedWeight, codes: Stored, scale: Stored, config: Mapping[str, Any]) -> Count:
    """Return the number of parameters in a weight that MLX packed, or "unknown". codes, scale: its codes and scales. config: the
    content of config.json, which gives bits and group size for the model or for a single module.
    """
    declared = config.get("quantization") or config.get("quantization_config")
    if not isinstance(declared, Mapping):
        return "unknown"
    own = declared.get(weight.stem.rstrip("."))
    named = own if isinstance(own, Mapping) else declared
    bits, group = named.get("bits"), named.get("group_size")
    if not isinstance(bits, int) or not isinstance(group, int) or bits < 1:
        return "unknown"
    if 32 * _last(codes) != bits * group * _last(scale):  # the configuration is not that of this weight
        return "unknown"
    return prod(codes.shape) * 32 // bits


def _compressed_count(codes: Stored, scale: Stored, config: Mapping[str, Any]) -> Count:
    """Return the number of parameters in a weight that compressed-tensors packed: several codes in each word or byte. codes, scale:
    the weight's codes and scales. config: the content of config.json, which may give the number of bits.
    """
    width = 32 if codes.dtype.endswith("32") else 8
    if width == 8:  # NVFP4 has a scale in fp8 for 16 values, MXFP4 and MXFP6 have an exponent in a byte for 32
        values = _last(scale) * (16 if scale.dtype.startswith("float8_e4m3") else 32)
        return prod(codes.shape[:-1]) * values
    schemes = integer_schemes(config)
    fitting = {
        bits
        for bits, group in schemes
        if group is None or group < 1 or -(-(_last(codes) * width // bits) // group) == _last(scale)
    }
    fitting = fitting if len(fitting) == 1 else {bits for bits, _ in schemes}
    return prod(codes.shape) * width // fitting.pop() if len(fitting) == 1 else "unknown"


def integer_schemes(config: Mapping[str, Any]) -> set[tuple[int, int | None]]:
    """Return the pairs (bits per value, group size) with which integer weights are packed, according to the `config_groups` of the
    configuration's `quantization_config`. The group size is None if it is not declared. config: the content of config.json.
    """
    declared = config.get("quantization_config")
    groups = declared.get("config_groups") if isinstance(declared, Mapping) else None
    found = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("type", "int") == "int":
            bits, size = weights.get("num_bits"), weights.get("group_size")
            if isinstance(bits, int) and 0 < bits <= 8:
                found.add((bits, size if isinstance(size, int) else None))
    return found


def _bits(config: Mapping[str, Any]) -> int | None:
    """Return the number of bits per value that `quantization_config` declares, or None if it declares none."""
    declared = config.get("quantization_config")
    if not isinstance(declared, Mapping):
        return None
    bits = declared.get("bits")
    if not isinstance(bits, int):
        within = declared.get("quant_config")
        params = within.get("weight_quant_params") if isinstance(within, Mapping) else None
        bits = params.get("nbits") if isinstance(params, Mapping) else None
    return bits if isinstance(bits, int) and bits > 0 else None
