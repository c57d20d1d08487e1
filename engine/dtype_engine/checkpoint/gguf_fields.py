"""Decides whether a field of a GGUF header changes what the model computes.

llama.cpp reads the fields whose names begin with the architecture, as in "llama.logit_scale". A field that has no place in
transformers' configuration must have a value with which the model computes what that configuration says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
_OFF, _ONE = (0,), (0, 1)
_VALUES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale", "expert_weights_scale",
         "expert_group_scale"),
        _ONE,
    ),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "attention.max_alibi_bias",
         "attention.clamp_kqv", "attention.shared_kv_layers", "leading_dense_block_count", "nextn_predict_layers",
         "expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length",
         "expert_shared_feed_forward_length", "n_deepstack_layers", "rescale_every_n_layers", "full_attention_interval",
         "activation_sparsity_scale", "pooling_type", "attention.temperature_scale", "attention.temperature_length",
         "rope.scaling.yarn_log_multiplier", "rope.scaling.alpha", "embedding_length_per_layer_input"),
        _OFF,
    ),
    **dict.fromkeys(
        ("expert_group_count", "expert_group_used_count", "expert_gating_func", "interleave_moe_layer_step",
         "moe_every_n_layers"),
        _ONE,
    ),
    "rope.scaling.yarn_attn_factor": (1,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "swin_norm": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
}  # fmt: skip
"""Maps a field to the values with which it changes nothing. An `expert_gating_func` of 1 is softmax, which all models have."""
_ENTRIES: Mapping[str, str] = {
    "attention.value_length": "head_dim", "attention.key_length_swa": "head_dim", "attention.value_length_swa": "head_dim",
    "rope.dimension_count_swa": "head_dim", "rope.freq_base_swa": "rope_theta", "embedding_length_out": "hidden_size",
    "attention.layer_norm_epsilon": "rms_norm_eps",
}  # fmt: skip
"""Maps a field to the entry of config.json whose value the field must have to change nothing."""


def _window(value: Any, config: Config) -> bool:
    return type(value) is int and (value == 0 or value >= config.get("max_position_embeddings", math.inf))


def _norm_of_experts(value: Any, config: Config) -> bool:
    """Return whether `value`, the field for normalizing the weights of experts, agrees with the configuration. Mixtral's
    configuration has no entry for this, because Mixtral always normalizes the weights of experts.
    """
    experts = {"num_experts", "num_local_experts"} & config.keys()
    return not experts or value is config.get("norm_topk_prob", config["model_type"] == "mixtral")


_RULES: Mapping[str, Callable[[Any, Config], bool]] = {
    "attention.scale": lambda value, config: _same(value, 0) or _same(value, config["head_dim"] ** -0.5),
    "attention.sliding_window": _window,
    "attention.sliding_window_pattern": lambda value, config: config["model_type"] == "gemma2" and _same(value, 2),
    "expert_weights_norm": _norm_of_experts,
    "rope.scaling.finetuned": lambda value, config: True,  # llama.cpp shows it and does not use it
}


def changes_nothing(name: str, value: Any, config: Config) -> bool:
    """Return whether a field does not change what the model of config.json computes. False if the field is unknown. name: of the
    field, without the architecture's prefix.
    """
    if name in _RULES:
        return _RULES[name](value, config)
    if name in _ENTRIES:
        return _same(value, config.get(_ENTRIES[name]))
    return any(_same(value, harmless) for harmless in _VALUES.get(name, ()))


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal. Numbers are compared with a tolerance, since a GGUF file has them in float32."""
    numbers = all(type(each) in (int, float) for each in (value, other))
    return math.isclose(value, other, rel_tol=1e-6) if numbers else type(value) is type(other) and value == other
