"""What GGUF calls a tensor: by the gguf package where it is installed, else by a table for Llama and its many kin."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

LLAMA_LIKE = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"})
"""Model types that the table of this file is right for; a test compares it with the gguf package."""
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
# Names of config.json's model_type that gguf spells otherwise.
_ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "deepseek_v3": "deepseek2", "deepseek_v2": "deepseek2", "gpt_neox": "gptneox",
}  # fmt: skip


class Unknown(Exception):
    """There is no table for this model type."""


def name_map(model_type: str | None, blocks: int) -> Callable[[str], str | None]:
    """A function from a module's name in transformers to GGUF's, without `.weight`. Raises Unknown."""
    if model_type is None:
        raise Unknown("GGUF names depend on the architecture, and there is no model_type in a config.json")
    installed = _by_gguf(model_type, blocks)
    if installed is not None:
        return installed
    if model_type not in LLAMA_LIKE:
        raise Unknown(f"no GGUF names are known for model type {model_type!r}; installing the gguf package may help")
    return by_table


def by_table(name: str) -> str | None:
    """The table of this file."""
    inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if inside is None:
        return _TOP.get(name)
    local = _IN_BLOCK.get(inside[2])
    return local and f"blk.{inside[1]}.{local}"


def _by_gguf(model_type: str, blocks: int) -> Callable[[str], str | None] | None:
    """gguf's own table for an architecture; None where it has none or is not installed."""
    if importlib.util.find_spec("gguf") is None:
        return None
    gguf: Any = importlib.import_module("gguf")
    spelled = model_type.removesuffix("_text")
    wanted = {_ARCHITECTURES.get(spelled, spelled), spelled.replace("_", ""), spelled.replace("_", "-")}
    for architecture, name in gguf.MODEL_ARCH_NAMES.items():
        if name in wanted:
            get: Callable[[str], str | None] = gguf.get_tensor_name_map(architecture, blocks).get_name
            return get
    return None
