"""Checkpoints that are quantised already: what their tensors are, and why a cast can't touch them.

Told by the names beside a weight, which each method writes, and by `quantization_config` in `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
