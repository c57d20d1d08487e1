"""Small mixtures of experts with random weights: what tests of experts run on, beside those of `architectures`."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tests.helpers.architectures import VOCABULARY

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_SMALL, "num_key_value_heads": 1}
_LATENT = {
    **_SMALL, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "moe_intermediate_size": 24,
}  # fmt: skip
_MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "OLMoE": ("OlmoeForCausalLM", "OlmoeConfig", {**_GROUPED, "num_experts": 8, "num_experts_per_tok": 3}),
    "Qwen2-MoE": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **_GROUPED, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1,
        },
    ),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_GROUPED, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "n_group": 2, "topk_group": 1,
        },
    ),
    "GLM-4.5": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            **_GROUPED, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Granite-MoE": (
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        {**_GROUPED, "num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
    "HunYuan": (
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        {**_GROUPED, "head_dim": 16, "num_experts": 4, "moe_topk": 2},
    ),
    "Jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    # transformers hands each token to all experts of Llama 4 and JetMoE, with a weight of 0 for those that were not chosen.
    "Llama 4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 40,
        },
    ),
    "JetMoE": (
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        },
    ),
}  # fmt: skip
MIXTURES = tuple(_MIXTURES)


def make_mixture(name: str) -> Any:
    """Return a new model of `MIXTURES` in float32, always with the same weights."""
    model, config, settings = _MIXTURES[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
