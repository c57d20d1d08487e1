"""Small PEFT adapters and their bases, written by hand, with the merged weights as plain torch computes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

_SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64,
}  # fmt: skip
PREFIX = "base_model.model."
LAYER = "model.layers.1"


@dataclass
class Adapter:
    """What an adapter's folder holds, and the weights that change in the base's files once it is merged."""

    tensors: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    config: dict[str, Any] = field(default_factory=dict)


def llama(**settings: Any) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(_SMALL | settings)))


def save_base(
    folder: Path, model: transformers.PreTrainedModel, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Write a base model, and return the tensors of its file."""
    model.to(dtype).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def save_adapter(folder: Path, base: Path | str, adapter: Adapter) -> Path:
    """Write an adapter as `PeftModel.save_pretrained` does."""
    folder.mkdir()
    save_file(
        {PREFIX + name: tensor.contiguous() for name, tensor in adapter.tensors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 10} | adapter.config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def matrices(outputs: int, inputs: int, rank: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random A [rank, inputs] and B [outputs, rank], whose product is about as large as the weights."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rank, inputs, generator=draw) / 8, torch.randn(outputs, rank, generator=draw) / 8


def pair(module: str, down: torch.Tensor, up: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}


def linear(base: dict[str, torch.Tensor]) -> Adapter:
    """Of three layers, with a rank and a factor of their own by patterns."""
    shapes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "mlp.down_proj": (32, 24)}
    ranks, scales = (
        {"mlp.down_proj": 2},
        {"self_attn.q_proj": 3 / 4, "self_attn.k_proj": 10 / 4, "mlp.down_proj": 10 / 2},
    )
    tensors, expected = {}, {}
    for seed, (name, shape) in enumerate(shapes.items()):
        down, up = matrices(*shape, ranks.get(name, 4), seed)
        tensors |= pair(f"{LAYER}.{name}", down, up)
        weight = f"{LAYER}.{name}.weight"
        expected[weight] = base[weight].float() + scales[name] * (up @ down)
    config = {"target_modules": ["q_proj", "k_proj", "down_proj"]}
    return Adapter(
        tensors, expected, config | {"rank_pattern": {r"layers\.1\.mlp.down_proj": 2}, "alpha_pattern": {"q_proj": 3}}
    )


def rslora(base: dict[str, torch.Tensor]) -> Adapter:
    down, up = matrices(32, 24)
    name = f"{LAYER}.mlp.down_proj"
    expected = base[f"{name}.weight"].float() + 10 / math.sqrt(4) * (up @ down)
    return Adapter(pair(name, down, up), {f"{name}.weight": expected}, {"use_rslora": True})


def biased(base: dict[str, torch.Tensor]) -> Adapter:
    down, up = matrices(32, 32)
    name = f"{LAYER}.self_attn.q_proj"
    bias = torch.linspace(-1, 1, 32)
    expected = {
        f"{name}.weight": base[f"{name}.weight"] + 2.5 * (up @ down),
        f"{name}.bias": base[f"{name}.bias"] + 2.5 * bias,
    }
    return Adapter(pair(name, down, up) | {f"{name}.lora_B.bias": bias}, expected, {"lora_bias": True})


def dora(base: dict[str, torch.Tensor]) -> Adapter:
    down, up = matrices(24, 32)
    name = f"{LAYER}.mlp.up_proj"
    magnitude = torch.linspace(0.5, 2, 24)
    moved = base[f"{name}.weight"] + 2.5 * (up @ down)
    expected = moved / moved.norm(dim=1, keepdim=True) * magnitude[:, None]
    tensors = pair(name, down, up) | {f"{name}.lora_magnitude_vector": magnitude}
    return Adapter(tensors, {f"{name}.weight": expected}, {"use_dora": True})


def embedding(base: dict[str, torch.Tensor]) -> Adapter:
    down, up = matrices(32, 64)
    name = "model.embed_tokens"
    expected = base[f"{name}.weight"].float() + 2.5 * (up @ down).T
    return Adapter({f"{name}.lora_embedding_A": down, f"{name}.lora_embedding_B": up}, {f"{name}.weight": expected})


def saved_head(base: dict[str, torch.Tensor]) -> Adapter:
    """A head that was trained as a whole, and an embedding whose own values are saved beside its matrices."""
    head, table = torch.randn(64, 32, generator=torch.Generator().manual_seed(5)), base["model.embed_tokens.weight"] + 1
    found = embedding({"model.embed_tokens.weight": table})
    tensors = found.tensors | {"lm_head.weight": head, "model.embed_tokens.base_layer.weight": table}
    return Adapter(tensors, found.expected | {"lm_head.weight": head}, {"modules_to_save": ["lm_head"]})


def conv1d(base: dict[str, torch.Tensor]) -> Adapter:
    """Of GPT-2, whose weights are [in, out] and whose files lack the first part of the modules' names. One is square."""
    tensors, expected = {}, {}
    for name, outputs in (("h.1.attn.c_attn", 96), ("h.1.attn.c_proj", 32)):
        down, up = matrices(outputs, 32)
        tensors |= pair(f"transformer.{name}", down, up)
        weight = next(each for each in base if each.endswith(f"{name}.weight"))
        expected[weight] = base[weight] + 2.5 * (up @ down).T
    return Adapter(tensors, expected, {"fan_in_fan_out": True})


def _of_expert(down: torch.Tensor, up: torch.Tensor, expert: int, experts: int) -> torch.Tensor:
    """B_e @ A_e of a parameter: A has the experts one below the other, and B has a column of each expert for each rank."""
    rank = len(down) // experts
    return up[:, expert::experts] @ down[expert * rank : (expert + 1) * rank]


def single_experts(base: dict[str, torch.Tensor]) -> Adapter:
    """Of both parameters of Mixtral's experts, whose files hold each expert's layers."""
    module, files, expected = f"{LAYER}.mlp.experts", f"{LAYER}.block_sparse_moe.experts", {}
    of_up, of_down = matrices(48, 32, 2 * 4, 1), matrices(32, 24, 2 * 4, 2)
    for expert in range(4):
        both = _of_expert(*of_up, expert, 4)
        for layer, added in (("w1", both[:24]), ("w3", both[24:]), ("w2", _of_expert(*of_down, expert, 4))):
            name = f"{files}.{expert}.{layer}.weight"
            expected[name] = base[name] + 5 * added
    config = {"r": 2, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    return Adapter(pair(f"{module}.base_layer", *of_up) | pair(module, *of_down), expected, config)


def packed_experts(base: dict[str, torch.Tensor]) -> Adapter:
    """Of a square parameter of gpt-oss' experts, which are [experts, in, out]."""
    name = f"{LAYER}.mlp.experts"
    down, up = matrices(32, 32, 2 * 4)
    added = torch.stack([_of_expert(down, up, expert, 4).T for expert in range(4)])
    config = {"r": 2, "target_parameters": ["mlp.experts.down_proj"]}
    return Adapter(pair(name, down, up), {f"{name}.down_proj": base[f"{name}.down_proj"] + 5 * added}, config)


def _gpt2() -> transformers.PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
    )


def _mixtral() -> transformers.PreTrainedModel:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2)
    )


def _gpt_oss() -> transformers.PreTrainedModel:
    settings = _SMALL | {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    kinds = ["full_attention", "sliding_attention"]
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings, layer_types=kinds))


KINDS: dict[str, tuple[Callable[[], transformers.PreTrainedModel], Callable[[dict[str, torch.Tensor]], Adapter]]] = {
    "linear layers": (llama, linear),
    "rank-stabilized": (llama, rslora),
    "biases": (lambda: llama(attention_bias=True), biased),
    "DoRA": (llama, dora),
    "an embedding": (llama, embedding),
    "a saved head": (llama, saved_head),
    "a saved head that was tied": (lambda: llama(tie_word_embeddings=True), saved_head),
    "Conv1D": (_gpt2, conv1d),
    "experts in several tensors": (_mixtral, single_experts),
    "experts in one tensor": (_gpt_oss, packed_experts),
}
"""For each kind: what makes the base, and what makes the adapter of its tensors."""


def make(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write an adapter of a kind and its base, `adapter` and `base` in a folder. Returns (the adapter's folder, all tensors of the
    merged model's file, where those that change are in float32).
    """
    torch.manual_seed(0)
    model, adapt = KINDS[kind]
    base = save_base(folder / "base", model(), dtype)
    made = adapt(base)
    return save_adapter(folder / "adapter", folder / "base", made), base | made.expected
