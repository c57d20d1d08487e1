"""Checkpoints that are quantized already: which tensors make one weight.

An export of this program says so in its metadata: a weight is its data, its scales and a dtype, which `numerics.quantize` can
dequantize. Of other schemes the parts are known by the names that each writes beside a weight, and by `quantization_config` in
`config.json`: why a cast can't touch them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable

SCALED_KEY = "dtype_engine.scaled."
"""In an exported file's metadata: this and a tensor's name, for its storage-only dtype."""
SCALE_SUFFIX = "_scale"
"""`weight_scale` goes with `weight`, as in compressed-tensors."""
OWN_SUFFIX = "_quantized"
"""`weight_quantized` is a scaled `weight` that compressed-tensors can't express. Under its own name, other loaders would take
the numbers for values without a word."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A storage-only weight of an exported checkpoint: its dtype (`@tensor` included), its data and its float32 scales."""

    dtype: str
    data: CheckpointTensor
    scale: CheckpointTensor


def read_quantized(
    path: Path, tensors: Mapping[str, CheckpointTensor], metadata: Mapping[str, str]
) -> dict[str, QuantizedWeight]:
    """The weights that an export of this program stored with scales, by the name that the model has for them.

    Raises UserError where the file's own account of them does not agree with its tensors.
    """
    weights: dict[str, QuantizedWeight] = {}
    for key, dtype in metadata.items():
        if not key.startswith(SCALED_KEY):
            continue
        name = key.removeprefix(SCALED_KEY)
        data = tensors.get(name) or tensors.get(name + OWN_SUFFIX)
        scale = tensors.get(name + SCALE_SUFFIX)
        if (
            data is None
            or scale is None
            or dtype not in dtypes.STORAGE_DTYPES
            or data.dtype != dtypes.BY_NAME[dtype].torch_name
            or scale.dtype != "float32"
            or scale.nbytes != dtypes.SCALE_BYTES * dtypes.scale_count(data.shape, dtype)
        ):
            raise UserError(
                f"{path}: the tensors of {printable(name)} are not those of a weight in {printable(dtype)} with its scales"
            )
        weights[name] = QuantizedWeight(dtype, data, scale)
    return weights


_SIGNS: dict[str, tuple[str, tuple[str, ...], str]] = {
    # the last word of a name that tells: what stands before it, all that belongs to the weight, what it is
    "weight_scale_inv": (
        "",
        ("weight", "weight_scale_inv", "activation_scale", "input_scale"),
        "fp8 with block scales (DeepSeek)",
    ),
    "weight_packed": (
        "",
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
        "packed by compressed-tensors",
    ),
    "weight_scale": (
        "",
        ("weight", "weight_scale", "weight_zero_point", "input_scale", "output_scale", "weight_scale_2", "input_zero_point"),
        "quantised with scales (compressed-tensors)",
    ),
    "absmax": (
        "weight.",
        (
            "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
            "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4",
        ),
        "4-bit by bitsandbytes",
    ),
    "SCB": ("", ("weight", "SCB", "weight_format"), "int8 by bitsandbytes"),
    "qweight": ("", ("qweight", "qzeros", "scales", "g_idx", "bias_scales"), "packed by GPTQ or AWQ"),
}  # fmt: skip


def quantized_parts(names: Iterable[str], config: dict[str, Any] | None = None) -> dict[str, str]:
    """For every tensor that is part of a quantised weight, why it is never cast."""
    everything = names if isinstance(names, dict) else dict.fromkeys(names)
    described = _described(config)
    reasons = {sign: f"part of a weight that is {described or what}" for sign, (_, _, what) in _SIGNS.items()}
    found: dict[str, str] = {}
    for name in everything:
        sign = name[name.rfind(".") + 1 :]
        if sign not in _SIGNS:
            continue
        before, parts, _ = _SIGNS[sign]
        prefix = name.removesuffix(before + sign)
        if sign == "weight_scale" and f"{prefix}weight" not in everything:
            continue
        for part in parts:
            if prefix + part in everything:
                found.setdefault(prefix + part, reasons[sign])
    return found


def _described(config: dict[str, Any] | None) -> str | None:
    """What `quantization_config` says it is, in a few words."""
    said = (config or {}).get("quantization_config")
    if not isinstance(said, dict):
        return None
    method = str(said.get("quant_method") or "")
    bits = said.get("bits") or (4 if said.get("load_in_4bit") else 8 if said.get("load_in_8bit") else None)
    if method == "fp8" and said.get("weight_block_size"):
        return "fp8 with block scales"
    if not method:
        return None
    return f"quantised by {method}" + (f", {bits} bit" if isinstance(bits, int) else "")
