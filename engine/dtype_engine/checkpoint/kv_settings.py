"""Reads the formats of KV caches that the `config.json` of a quantized checkpoint declares. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

DeclaredFormat = tuple[str, str, str]
"""A format of KV caches that a configuration declares: (the name of the attention module, or "" for all; the cache tensor, "k" or
"v", or "" for both; the format).
"""
_MODELOPT = {
    "FP8": (("", "float8_e4m3fn@tensor"),), "NVFP4": (("", "nvfp4"),),
    "FP8_K_NVFP4_V": (("k", "float8_e4m3fn@tensor"), ("v", "nvfp4")),
}  # fmt: skip


def declared_formats(config: Mapping[str, object] | None) -> tuple[DeclaredFormat, ...]:
    """Return the formats of KV caches that a `config.json` declares: compressed-tensors' `kv_cache_scheme`, or ModelOpt's
    `kv_cache_quant_algo` and `kv_cache_quantized_layers`.
    """
    quantization = (config or {}).get("quantization_config")
    if not isinstance(quantization, Mapping):
        return ()
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float":
        by_head = scheme.get("strategy") == "attn_head"
        return (
            (
                "",
                "",
                "fp8@token" if scheme.get("dynamic") is True else "fp8@head" if by_head else "float8_e4m3fn@tensor",
            ),
        )
    layers = quantization.get("kv_cache_quantized_layers")
    if not isinstance(layers, Mapping):
        layers = {"": {"quant_algo": quantization.get("kv_cache_quant_algo")}}
    return tuple(
        (module, part, form)
        for module, of_module in layers.items()
        if isinstance(module, str) and isinstance(of_module, Mapping)
        for part, form in _MODELOPT.get(str(of_module.get("quant_algo")), ())
    )


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor with this name in the files is a calibrated scale of a KV cache. No module of transformers has such a
    tensor.
    """
    return name.endswith((".k_scale", ".v_scale"))
