"""How many parameters the parts of an already quantised weight stand for, from names, shapes and the configuration.

Sources of the layouts: AutoGPTQ and AutoAWQ (`qweight` int32, 32 / bits values a word; `qzeros` packed alike along the outputs
that `scales` has one by one), compressed-tensors (`weight_packed`, int32 words or uint8 pairs), bitsandbytes 4-bit (two values
a byte), ModelOpt NVFP4 (`weight` uint8 beside `weight_scale_2`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Literal

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor

Count = int | Literal["unknown"] | None
"""None: the elements of the tensor are parameters themselves."""


def parameters_meant(
    tensors: Mapping[str, CheckpointTensor], parts: Iterable[str], config: Mapping[str, Any] | None = None
) -> dict[str, Count]:
    """For every part of a quantised weight, how many parameters it stands for: 0 for scales, zero points and descriptions.

    parts: names among `tensors`, whose shapes are those of the files.
    """
    bits = _bits(config)
    return {name: _meant(name, tensors, bits) for name in parts}


def _meant(name: str, tensors: Mapping[str, CheckpointTensor], bits: int | None) -> Count:
    module, _, local = name.rpartition(".")
    prefix = f"{module}." if module else ""
    tensor = tensors[name]
    size = prod(tensor.shape)
    if local == "qweight":
        zeros, scales = tensors.get(f"{prefix}qzeros"), tensors.get(f"{prefix}scales")
        if zeros is not None and scales is not None and zeros.shape[-1:] != (0,) and len(scales.shape) == 2:
            return size * scales.shape[-1] // zeros.shape[-1]
        return size * 32 // bits if bits else "unknown"
    if local == "weight_packed":
        if not bits:
            return "unknown"
        return size * (32 if tensor.dtype == "int32" else 8) // bits
    if local != "weight":
        return 0
    if tensor.dtype == "uint8":
        four_bits = f"{prefix}weight.absmax" in tensors or f"{prefix}weight_scale_2" in tensors
        return 2 * size if four_bits else "unknown"
    return None


def _bits(config: Mapping[str, Any] | None) -> int | None:
    """Bits of one value by `quantization_config`; None where it does not say, or says several."""
    said = (config or {}).get("quantization_config")
    if not isinstance(said, Mapping):
        return None
    if isinstance(said.get("bits"), int):
        return int(said["bits"]) or None
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping):
        return None
    widths = {
        weights.get("num_bits")
        for group in groups.values()
        if isinstance(group, Mapping) and isinstance(weights := group.get("weights"), Mapping)
    }
    only = next(iter(widths)) if len(widths) == 1 else None
    return only if isinstance(only, int) and only > 0 else None
