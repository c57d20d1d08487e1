"""Describes the model in a GGUF file as transformers has it: the content of config.json, and the weights under transformers'
names.

llama.cpp's converter (`convert_hf_to_gguf.py`) renames tensors, stacks the experts of a layer, reorders the rows of queries and
keys for some architectures, and adds 1 to the norms of Gemma. This module undoes the renaming and the stacking. The decoder
undoes the other two steps. If an architecture is not in `_FAMILIES`, its weights keep llama.cpp's names, and the model can't be
run.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.encoded_weight import CODES, MOST_EXPERTS, EncodedWeight, read_small
from dtype_engine.core import dtypes

SCHEME = "gguf"
_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
_SHARED_EXPERT = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3", "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}  # fmt: skip
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_DENSE = {**_ATTENTION, **_MLP, **_NORMS}
_FIELDS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta", "vocab_size": "vocab_size",
}  # fmt: skip
_EXPERT_FIELDS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_ROPE_FACTORS = "rope_freqs.weight"
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class _Family:
    """How llama.cpp names and stores the tensors of the models of one transformers class."""

    model_type: str
    model_class: str
    names: Mapping[str, str]
    """Maps llama.cpp's name of each tensor of a block to its name in transformers, such as "attn_q" to "self_attn.q_proj"."""
    fields: Mapping[str, str] = field(default_factory=lambda: _FIELDS)
    """Maps fields of the header to entries of config.json, such as "block_count" to "num_hidden_layers". The file's names also
    begin with the architecture, as in "llama.block_count".
    """
    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json that are the same for all models of the architecture."""
    reordered: bool = False
    """Whether llama.cpp's converter reordered the rows of queries and keys for llama.cpp's rotary embedding."""
    shifted_norms: bool = False
    """Whether the file stores 1 + w for each weight w of a norm."""


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", _DENSE, reordered=True),
    "mixtral": _Family(
        "mixtral", "MixtralForCausalLM", {**_ATTENTION, **_NORMS, **_MIXTRAL_EXPERTS},
        {**_FIELDS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}, reordered=True,
    ),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", _DENSE),
    "qwen2moe": _Family(
        "qwen2_moe", "Qwen2MoeForCausalLM", {**_DENSE, **_EXPERTS, **_SHARED_EXPERT},
        {**_FIELDS, **_EXPERT_FIELDS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", _DENSE),
    "qwen3moe": _Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", {**_DENSE, **_EXPERTS, "ffn_gate_inp": "mlp.gate"},
        {**_FIELDS, **_EXPERT_FIELDS}, {"norm_topk_prob": True},
    ),
    "gemma": _Family("gemma", "GemmaForCausalLM", _DENSE, shifted_norms=True),
    "gemma2": _Family(
        "gemma2", "Gemma2ForCausalLM", {**_ATTENTION, **_MLP, **_FOUR_NORMS},
        {**_FIELDS, "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
         "final_logit_softcapping": "final_logit_softcapping"},
        shifted_norms=True,
    ),
    "phi3": _Family(
        "phi3", "Phi3ForCausalLM", {**_ATTENTION, **_NORMS, "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        {**_FIELDS, "attention.sliding_window": "sliding_window"}, {"pad_token_id": None},
    ),
}  # fmt: skip
"""The architectures whose models can be described as transformers has them, keyed by `general.architecture`. The key `mixtral` is
an exception: such a file has the architecture "llama" and a number of experts.
"""
_BY_MODEL_TYPE = {family.model_type: family for family in _FAMILIES.values()}


def config_of(fields: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor]) -> dict[str, Any] | None:
    """Return the content of config.json in the checkpoint from which a GGUF file was made. Returns None in three cases: the
    architecture is not in `_FAMILIES`, the header lacks a field that every such model has, or a field has a list with a number
    for each block.

    fields: the fields of the header. Of a list, only the length is given. tensors: the tensors of the file by name. Raises
    UserError if the factors of the rotary embedding can't be read.
    """
    architecture = fields.get("general.architecture")
    if architecture == "llama" and _count(fields.get("llama.expert_count")):
        family = _FAMILIES["mixtral"]
    elif architecture in _FAMILIES:
        family = _FAMILIES[str(architecture)]
    else:
        return None
    own = {name.removeprefix(f"{architecture}."): value for name, value in fields.items()}
    found = {entry: own[name] for name, entry in family.fields.items() if name in own}
    found.setdefault("vocab_size", own.get("tokenizer.ggml.tokens"))
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    given = (entry for entry in ("num_key_value_heads", "head_dim") if entry in found)
    if not all(_count(found.get(entry)) for entry in (*needed, *given)):
        return None
    found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
    for name, entry in (("blk.0.attn_q.weight", "num_attention_heads"), ("blk.0.attn_k.weight", "num_key_value_heads")):
        if name in tensors and entry in found and tensors[name].shape[:1] != (found[entry] * found["head_dim"],):
            return None  # the field is a list with a number for each block, and only its length is known
    config = {
        "model_type": family.model_type,
        "architectures": [family.model_class],
        **family.config,
        **found,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "dtype": "float32",
    }
    if family.model_type == "gemma2":
        # The queries of the model with 46 layers (27 B) are scaled by hidden_size / heads instead of the head's own size.
        heads = config["num_attention_heads"]
        config["query_pre_attn_scalar"] = (
            config["hidden_size"] // heads if config["num_hidden_layers"] == 46 else config["head_dim"]
        )
    scaling = _rope_scaling(own, tensors, config)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _rope_scaling(
    own: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the entry `rope_scaling` of config.json, or None if the rotary embedding is not scaled. own: the fields of the GGUF
    header, by name without the architecture. tensors: the tensors of the file. config: the other entries of config.json.
    """
    factors = tensors.get(_ROPE_FACTORS)
    if factors is not None and factors.dtype == "float32":
        # The file has a factor for each frequency, but not the rule that gave the factors (an example is Llama 3.1). In
        # transformers, "longrope" is the rule that accepts any factors.
        values = list(struct.unpack(f"<{factors.nbytes // 4}f", read_small(factors)))
        length = config.get("max_position_embeddings", 2048)
        return {"rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0,
                "original_max_position_embeddings": length, "factor": 1.0}  # fmt: skip
    kind, factor = own.get("rope.scaling.type"), own.get("rope.scaling.factor")
    if kind not in ("linear", "yarn") or not isinstance(factor, float):
        return None
    original = own.get("rope.scaling.original_context_length")
    more = {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_type": kind, "factor": factor, **more}


def read(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any] | None
) -> tuple[dict[str, EncodedWeight], dict[str, str]]:
    """Return two mappings. The first has the weights of a GGUF file that must be decoded, keyed by their names in transformers.
    The second has the tensors that need no decoding, and maps their names in the file to their names in transformers. A tensor
    that transformers does not have keeps its name.

    tensors: the tensors of the file by name. config: the result of `config_of`.
    """
    family = _BY_MODEL_TYPE[config["model_type"]] if config is not None else None
    encoded: dict[str, EncodedWeight] = {}
    renamed: dict[str, str] = {}
    for own, tensor in tensors.items():
        if tensor.refusal is not None:
            continue
        name, local = _name(own, family) if family is not None else (None, "")
        if name is None or family is None or config is None:
            if tensor.packed:
                encoded[own] = EncodedWeight(own, tensor.shape, SCHEME, _format(tensor), {CODES: tensor})
            continue
        settings = _changes(local, family, config)
        if "{}" in name:
            encoded |= _experts(name, tensor)
        elif tensor.packed or settings or name.endswith("shared_expert_gate.weight"):
            shape = (1, *tensor.shape) if len(tensor.shape) == 1 and "shared_expert_gate" in name else tensor.shape
            encoded[name] = EncodedWeight(name, shape, SCHEME, _format(tensor), {CODES: tensor}, settings)
        else:
            renamed[own] = name
    return encoded, renamed


def _name(own: str, family: _Family) -> tuple[str | None, str]:
    """Return a tensor's name in transformers and llama.cpp's word for it. For `blk.0.attn_q.weight`, they are
    `model.layers.0.self_attn.q_proj.weight` and `attn_q`. The name is None if transformers has no such tensor. The name of
    stacked experts has `{}` in place of an expert's number. own: the tensor's name in the file.
    """
    stem, _, kind = own.rpartition(".")
    if stem in _WHOLE and kind in ("weight", "bias"):
        return f"{_WHOLE[stem]}.{kind}", stem
    match = _IN_BLOCK.fullmatch(own)
    if match is None or match[2] not in family.names:
        return None, ""
    return f"model.layers.{match[1]}.{family.names[match[2]]}.{match[3]}", match[2]


def _changes(local: str, family: _Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that tell the decoder which steps of llama.cpp's converter to undo, such as {"heads": 32} for reordered
    rows or {"offset": -1.0} for norms. Returns {} if there is nothing to undo. local: llama.cpp's word for the tensor, such as
    `attn_q`.
    """
    if family.reordered and local in ("attn_q", "attn_k"):
        heads = config["num_attention_heads"]
        return {"heads": heads if local == "attn_q" else config.get("num_key_value_heads", heads)}
    return {"offset": -1.0} if family.shifted_norms and local.endswith("norm") else {}


def _experts(name: str, tensor: CheckpointTensor) -> dict[str, EncodedWeight]:
    """Return a weight for each expert of a tensor [experts, out, in]. In the file, the bytes of the
    experts lie one after the other. name: the weights' name, with `{}` in place of the expert's number.
    """
    count = tensor.shape[0] if len(tensor.shape) == 3 else 0
    if not 0 < count <= MOST_EXPERTS or tensor.nbytes % count or tensor.start is None:
        return {}
    each = tensor.nbytes // count
    found = {}
    for expert in range(count):
        own = replace(tensor, shape=tensor.shape[1:], start=tensor.start + expert * each, nbytes=each)
        one = name.format(expert)
        found[one] = EncodedWeight(one, own.shape, SCHEME, _format(tensor), {CODES: own})
    return found


def _format(tensor: CheckpointTensor) -> str:
    return f"{SCHEME}:{dtypes.short_name(tensor.dtype)}"


def _count(value: object) -> bool:
    return type(value) is int and value > 0
