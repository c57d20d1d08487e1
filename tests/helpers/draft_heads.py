"""Checkpoints with a draft head (multi-token prediction): transformers makes the model, and the head's tensors are added under the
names that published checkpoints have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.helpers.file_edits import Tensors, change_tensors

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
}  # fmt: skip


def _deepseek() -> transformers.PreTrainedModel:
    config = transformers.DeepseekV3Config(
        **_SMALL, num_key_value_heads=2, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=32,
        kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_shared_experts=1,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def _qwen() -> transformers.PreTrainedModel:
    config = transformers.Qwen3NextConfig(
        **_SMALL, num_key_value_heads=1, head_dim=16, num_experts=4, shared_expert_intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


MAKERS: dict[str, tuple[Callable[[], transformers.PreTrainedModel], str, str, tuple[str, ...], tuple[str, ...]]] = {
    "deepseek_v3": (
        _deepseek,
        "model.layers.2",
        "model.layers.2.",
        ("eh_proj", "shared_head.head", "embed_tokens"),
        ("enorm", "hnorm", "shared_head.norm"),
    ),
    "qwen3_next": (
        _qwen,
        "mtp",
        "mtp.layers.0.",
        ("fc",),
        ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    ),
}
"""By the entry `model_type`: (makes the model, the module of the head, how the names in its decoder layer begin, its matrices and
its norms outside this layer).
"""
NAMES = tuple(MAKERS)


def head_of(name: str) -> str:
    """Return the name of the module of the head."""
    return MAKERS[name][1]


def with_head(name: str, folder: Path) -> Tensors:
    """Save a model with a draft head in `folder`. Returns the tensors of the head by name."""
    make, head, layer, matrices, norms = MAKERS[name]
    torch.manual_seed(0)
    make().save_pretrained(folder)
    added: Tensors = {}

    def add(tensors: Tensors) -> None:
        for stored, tensor in list(tensors.items()):  # a draft layer is built like the model's last layer
            if stored.startswith("model.layers.1."):
                added[layer + stored.removeprefix("model.layers.1.")] = torch.randn(tensor.shape) * 0.1
        hidden = _SMALL["hidden_size"]
        for each in matrices:
            shape = (hidden, 2 * hidden) if each in ("eh_proj", "fc") else (_SMALL["vocab_size"], hidden)
            added[f"{head}.{each}.weight"] = torch.randn(shape) * 0.1
        added.update({f"{head}.{each}.weight": torch.ones(hidden) for each in norms})
        tensors.update(added)

    change_tensors(folder, add)
    return added


def linear_layers(head: Tensors) -> set[str]:
    """Return the names of the linear layers of a head: its matrices, but for embeddings and the router."""
    return {
        name.removesuffix(".weight")
        for name, tensor in head.items()
        if tensor.ndim == 2 and not name.endswith(("embed_tokens.weight", "mlp.gate.weight"))
    }


_TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64,
    "moe_intermediate_size": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "n_shared_experts": 1, "initializer_range": 0.3,
}  # fmt: skip
PUBLISHED: dict[str, tuple[int, Callable[[], transformers.PreTrainedModel]]] = {
    "deepseek_v3": (
        61,
        lambda: transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **_TINY, num_hidden_layers=61, first_k_dense_replace=60, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
                qk_nope_head_dim=4, v_head_dim=8,
            )
        ),
    ),
    "glm4_moe": (
        46,
        lambda: transformers.Glm4MoeForCausalLM(
            transformers.Glm4MoeConfig(**_TINY, num_hidden_layers=46, first_k_dense_replace=45, head_dim=8, attention_bias=True)
        ),
    ),
}  # fmt: skip
"""By the entry `model_type`: (the number of layers of a published model, by which transformers knows its draft head; makes a tiny
model with as many layers).
"""


def as_published(name: str, folder: Path) -> str:
    """Save a tiny model in `folder` with a draft head that transformers can run. Returns the name of the draft layer."""
    layers, make = PUBLISHED[name]
    torch.manual_seed(0)
    make().save_pretrained(folder)
    head, last = f"model.layers.{layers}", f"model.layers.{layers - 1}."

    def add(tensors: Tensors) -> None:
        for stored, tensor in list(tensors.items()):
            if stored.startswith(last):
                tensors[f"{head}.{stored.removeprefix(last)}"] = torch.randn(tensor.shape) * 0.3
        tensors[f"{head}.eh_proj.weight"] = torch.randn(16, 32) * 0.3
        for norm in ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"):
            tensors[f"{head}.{norm}.weight"] = torch.rand(16) + 0.5
        tensors[f"{head}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        tensors[f"{head}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(folder, add)
    return head
