"""Describes the model in a GGUF file as transformers has it: the content of config.json, and the weights under transformers' names.

llama.cpp's converter (`convert_hf_to_gguf.py`) renames tensors, stacks the experts of a layer, reorders the rows of queries and
keys for some architectures, and adds 1 to the norms of Gemma. This module undoes the renaming and the stacking. The decoder undoes
the other two steps. If an architecture is not in `_FAMILIES`, its weights keep llama.cpp's names, and the model can't be run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint.gguf_fields import changes_nothing
from dtype_engine.checkpoint.gguf_header import ListLength
from dtype_engine.checkpoint.gguf_rope import FIELDS as ROPE_FIELDS
from dtype_engine.checkpoint.gguf_rope import describe_rope
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import size
from dtype_engine.checkpoint.schemes.gguf import ROPE_FACTORS, SCHEME
from dtype_engine.checkpoint.schemes.scheme import CODES, MOST_EXPERTS, CodedWeight
from dtype_engine.core import dtypes
from dtype_engine.core.text import printable

_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}  # fmt: skip
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
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
_EPSILON, _WINDOW = "attention.layer_norm_rms_epsilon", "attention.sliding_window"
_WINDOW_FIELDS = {**_FIELDS, _WINDOW: "sliding_window"}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_ALL_ATTENTION = _QKV | {"attn_output"}
_IN_BLOCK = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class _Family:
    """How llama.cpp names and stores the tensors of the models of one transformers class."""

    model_type: str
    model_class: str
    names: Mapping[str, str]
    """Maps llama.cpp's name of each tensor of a block to its name in transformers, such as "attn_q" to "self_attn.q_proj"."""
    fields: Mapping[str, str] = field(default_factory=lambda: _FIELDS)
    """Maps fields of the header to entries of config.json, such as "block_count" to "num_hidden_layers"."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json that are the same for all models of the architecture."""
    reordered: bool = False
    """Whether llama.cpp's converter reordered the rows of queries and keys for llama.cpp's rotary embedding."""
    shifted_norms: bool = False
    """Whether the file stores 1 + w for each weight w of a norm."""
    biases: frozenset[str] = frozenset()
    """llama.cpp's names of the layers of a block that may have a bias."""
    optional_window: bool = False
    """Whether layers have a sliding window only if `use_sliding_window` in config.json is true, for which GGUF has no entry."""


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", _DENSE, reordered=True, biases=_ALL_ATTENTION | _MLP.keys()),
    "mistral": _Family("mistral", "MistralForCausalLM", _DENSE, _WINDOW_FIELDS, reordered=True),
    "mixtral": _Family(
        "mixtral", "MixtralForCausalLM", {**_ATTENTION, **_NORMS, **_MIXTRAL_EXPERTS},
        {**_WINDOW_FIELDS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        reordered=True,
    ),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", _DENSE, biases=_QKV, optional_window=True),
    "qwen2moe": _Family(
        "qwen2_moe", "Qwen2MoeForCausalLM", {**_ATTENTION, **_NORMS, **_EXPERTS, **_SHARED_EXPERT},
        {**_FIELDS, **_EXPERT_FIELDS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": False}, biases=_QKV, optional_window=True,
    ),
    "qwen3": _Family(
        "qwen3", "Qwen3ForCausalLM", {**_DENSE, **_HEAD_NORMS}, biases=_ALL_ATTENTION, optional_window=True
    ),
    "qwen3moe": _Family(
        "qwen3_moe", "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_HEAD_NORMS, **_NORMS, **_EXPERTS, "ffn_gate_inp": "mlp.gate"},
        {**_FIELDS, **_EXPERT_FIELDS}, {"norm_topk_prob": True}, biases=_ALL_ATTENTION, optional_window=True,
    ),
    "gemma": _Family("gemma", "GemmaForCausalLM", _DENSE, shifted_norms=True, biases=_ALL_ATTENTION),
    "gemma2": _Family(
        "gemma2", "Gemma2ForCausalLM", {**_ATTENTION, **_MLP, **_FOUR_NORMS},
        {**_WINDOW_FIELDS, "attn_logit_softcapping": "attn_logit_softcapping",
         "final_logit_softcapping": "final_logit_softcapping"},
        shifted_norms=True, biases=_ALL_ATTENTION,
    ),
    "phi3": _Family(
        "phi3", "Phi3ForCausalLM",
        {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", **_NORMS, "ffn_up": "mlp.gate_up_proj",
         "ffn_down": "mlp.down_proj"},
        _WINDOW_FIELDS, {"pad_token_id": None},
    ),
}  # fmt: skip
"""Keyed by `general.architecture`, except `mixtral` and `mistral`: their files say "llama", and give experts or a window."""
_BY_MODEL_TYPE = {family.model_type: family for family in _FAMILIES.values()}


def model_of(
    fields: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor]
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return (the content of config.json for the model in a GGUF file, sentences about lost entries). An entry of the file is lost
    if it changes what the model computes, and neither config.json nor the weights can hold it.

    The content is None if the architecture is not in `_FAMILIES`, if the header lacks a field that every such model has, or if a
    field that must be one number has a list with a number for each block. fields: those of the header. Raises UserError if the
    factors of the rotary embedding can't be read.
    """
    architecture = str(fields.get("general.architecture"))
    begin = f"{architecture}."
    own = {name.removeprefix(begin): value for name, value in fields.items() if name.startswith(begin)}
    family = _family(architecture, own)
    config = _config(family, own, fields, tensors) if family is not None else None
    if family is None or config is None:
        return None, ()
    rope = describe_rope(own, tensors, config, only_longrope=family.model_type == "phi3")
    config |= rope.config
    lost = [
        f"the entry {printable(begin + name)} ({printable(str(value), 60)})"
        for name, value in own.items()
        if (
            name in rope.lost
            if name in ROPE_FIELDS
            else isinstance(value, ListLength)
            or (name in (_WINDOW, *_CAPS) and not value and family.model_type == "gemma2")
            if name in family.fields
            else not (name == _WINDOW and family.optional_window) and not changes_nothing(name, value, config)
        )
    ]
    blocks = config["num_hidden_layers"]
    lost += [
        f"the tensor {printable(name)}"
        for name in tensors
        if (name in rope.lost if name in ROPE_FACTORS else _name(name, family, blocks)[0] is None)
    ]
    sentences = [
        f"{each} changes what the model computes, and is not translated for {family.model_class}" for each in lost
    ]
    if family.optional_window and not changes_nothing(_WINDOW, own.get(_WINDOW, 0), config):
        sentences.append(
            f"llama.cpp does not use the entry {printable(begin + _WINDOW)} ({printable(str(own[_WINDOW]), 60)}), and the header "
            f"does not say which layers of {family.model_class} have a sliding window (use_sliding_window)"
        )
    if _EPSILON not in own:
        sentences.append(f"the header has no entry {printable(begin + _EPSILON)}, which the norms of the model need")
    return config, tuple(sentences)


def _family(architecture: str, own: Mapping[str, Any]) -> _Family | None:
    if architecture == "llama" and size(own.get("expert_count")):
        return _FAMILIES["mixtral"]
    length = own.get("context_length")
    context = {"max_position_embeddings": length} if size(length) else {}
    if architecture == "llama" and not changes_nothing(_WINDOW, own.get(_WINDOW, 0), context):
        return _FAMILIES["mistral"]
    return None if architecture in ("mixtral", "mistral") else _FAMILIES.get(architecture)


def _config(
    family: _Family, own: Mapping[str, Any], fields: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor]
) -> dict[str, Any] | None:
    """Return config.json without the entries of the rotary embedding, or None (see `model_of`). own: see `describe_rope`."""
    found = {entry: own[name] for name, entry in family.fields.items() if name in own}
    tokens = fields.get("tokenizer.ggml.tokens")
    found.setdefault("vocab_size", int(tokens) if isinstance(tokens, ListLength) else None)
    needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]
    needed += [entry for entry in family.fields.values() if entry == "num_experts_per_tok"]
    given = (entry for entry in ("num_key_value_heads", "head_dim") if entry in found)
    if not all(size(found.get(entry)) for entry in (*needed, *given)):
        return None
    # Without these fields, llama.cpp has one default for all architectures, and transformers one for each.
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    found.setdefault("rope_theta", 10000.0)
    found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
    for name, entry in (("blk.0.attn_q.weight", "num_attention_heads"), ("blk.0.attn_k.weight", "num_key_value_heads")):
        if name in tensors and tensors[name].shape[:1] != (found[entry] * found["head_dim"],):
            return None  # the heads are not those of the weights
    if not found.get("sliding_window", 1):
        found["sliding_window"] = None  # the converter writes 0 for a model without a window
    words = {match[2] for name in tensors if (match := _IN_BLOCK.fullmatch(name)) and match[3] == "bias"}
    config = {
        "model_type": family.model_type,
        "architectures": [family.model_class],
        **family.config,
        **found,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": not words.isdisjoint(_ALL_ATTENTION),
        "dtype": "float32",
    }
    if not words.isdisjoint(family.biases & _MLP.keys()):
        config["mlp_bias"] = True
    if family.model_type == "gemma2":
        # The queries of the model with 46 layers (27 B) are scaled by hidden_size / heads instead of the head's own size.
        heads = config["num_attention_heads"]
        config["query_pre_attn_scalar"] = (
            config["hidden_size"] // heads if config["num_hidden_layers"] == 46 else config["head_dim"]
        )
    return config


def read(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any] | None
) -> tuple[dict[str, CodedWeight], dict[str, str]]:
    """Return two mappings for a GGUF file: the weights that must be decoded, by their names in transformers; and for each other
    tensor, its name in the file and its name in transformers. A tensor that transformers does not have keeps its name. config: None
    if the architecture is not known.
    """
    readable = {own: tensor for own, tensor in tensors.items() if tensor.refusal is None}
    if config is None:
        return {own: _coded(own, tensor) for own, tensor in readable.items() if tensor.packed}, {}
    family = _BY_MODEL_TYPE[config["model_type"]]
    coded: dict[str, CodedWeight] = {}
    renamed: dict[str, str] = {}
    for own, tensor in readable.items():
        name, local = _name(own, family, config["num_hidden_layers"])
        if name is None:
            if tensor.packed:
                coded[own] = _coded(own, tensor)
            continue
        settings = _changes(local, family, config)
        if "{}" in name:
            coded |= _experts(name, tensor)
        elif name.endswith("shared_expert_gate.weight"):  # llama.cpp has a vector, transformers a matrix of one row
            shape = (1, *tensor.shape) if len(tensor.shape) == 1 else tensor.shape
            coded[name] = replace(_coded(name, tensor), shape=shape)
        elif tensor.packed or settings:
            coded[name] = replace(_coded(name, tensor), settings=settings)
        else:
            renamed[own] = name
    return coded, renamed


def _name(own: str, family: _Family, blocks: int) -> tuple[str | None, str]:
    """Return a tensor's name in transformers and llama.cpp's word for it: `model.layers.0.self_attn.q_proj.weight` and `attn_q` for
    `blk.0.attn_q.weight`. The name is None if transformers has no such tensor, and has `{}` in place of an expert's number if the
    tensor stacks all experts. blocks: the number of the model's blocks.
    """
    stem, _, kind = own.rpartition(".")
    if stem in _WHOLE and kind == "weight":
        return f"{_WHOLE[stem]}.{kind}", stem
    match = _IN_BLOCK.fullmatch(own)
    if match is None or match[2] not in family.names or int(match[1]) >= blocks:
        return None, ""
    if match[3] == "bias" and match[2] not in family.biases:
        return None, ""
    return f"model.layers.{match[1]}.{family.names[match[2]]}.{match[3]}", match[2]


def _changes(local: str, family: _Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which the decoder reverses what llama.cpp's converter did to a tensor: {"heads": 32} for reordered
    rows, for example. local: llama.cpp's word for the tensor, such as `attn_q`.
    """
    if family.reordered and local in ("attn_q", "attn_k"):
        heads = config["num_attention_heads"]
        return {"heads": heads if local == "attn_q" else config.get("num_key_value_heads", heads)}
    return {"offset": -1.0} if family.shifted_norms and local.endswith("norm") else {}


def _experts(name: str, tensor: CheckpointTensor) -> dict[str, CodedWeight]:
    """Return a weight for each expert of a tensor [experts, out, in]. name: with `{}` for the number of an expert."""
    count = tensor.shape[0] if len(tensor.shape) == 3 else 0
    if not 0 < count <= MOST_EXPERTS or tensor.nbytes % count or tensor.start is None:
        return {}
    names = {name.format(expert): expert for expert in range(count)}
    return {name: _coded(name, tensor.at(expert)) for name, expert in names.items()}


def _coded(name: str, tensor: CheckpointTensor) -> CodedWeight:
    form = f"{SCHEME.name}:{dtypes.short_name(tensor.dtype)}"
    return CodedWeight(name, tensor.shape, SCHEME, form, {CODES: tensor})


def unpacked_dtype(weight: CodedWeight) -> str | None:
    """Return the dtype that holds the values of a weight that a GGUF file has in float32, float16 or bfloat16, but in another
    order or shape than transformers or with a norm's offset. None for a weight in blocks or of another format.
    """
    dtype = weight.parts[CODES].dtype
    if weight.scheme is not SCHEME or dtype not in ("float32", "float16", "bfloat16"):
        return None
    return "float32" if "offset" in weight.settings else dtype
