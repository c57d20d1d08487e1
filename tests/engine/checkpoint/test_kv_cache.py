"""The tensors of KV caches found from config.json and shapes alone, compared with the caches of running transformers models."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file
from tests.helpers.transformers_caches import cache_argument, cache_of
from torch import nn

from dtype_engine.checkpoint.kv_cache import kv_cache
from dtype_engine.core.kv_cache import KVCache, KVCacheTensor
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.recipe.serving_memory import cache_tensor_bytes, written_in
from dtype_engine.runtime.model.module_tree import tree_of

BATCH, CONTEXT, ENCODED = 2, 13, 17
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_MLA = {
    **_SMALL, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 3,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
_SHARED = {
    **_GROUPED, "num_hidden_layers": 6, "vocab_size_per_layer_input": 64, "head_dim": 8, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 5,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4}
_DELTA = {
    **_GROUPED, "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 4, "linear_value_head_dim": 8,
}  # fmt: skip
_KIMI = {
    **_MLA, "num_hidden_layers": 2, "pad_token_id": 0, "linear_head_dim": 8, "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_ZAMBA = {**_SMALL, "num_key_value_heads": 4, "num_hidden_layers": 6, "mamba_d_state": 4}
_ZAMBA2 = {**_ZAMBA, "n_mamba_heads": 8, "chunk_size": 4}

ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grouped heads": ("Llama", "ForCausalLM", _GROUPED),
    "fused projection": ("GPT2", "LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "one head of keys": ("GPTBigCode", "ForCausalLM", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "all heads of keys": ("Falcon", "ForCausalLM", {**_SMALL, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "MLA": ("DeepseekV3", "ForCausalLM", _MLA),
    "MLA with an indexer": (
        "DeepseekV32", "ForCausalLM", {**_MLA, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
    ),
    "window in every layer": ("Mistral", "ForCausalLM", {**_GROUPED, "sliding_window": 5}),
    "window in the upper layers": (
        "Qwen2", "ForCausalLM", {**_GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "every second layer in full": ("Gemma2", "ForCausalLM", {**_GROUPED, "head_dim": 8, "sliding_window": 5}),
    "chunks": (
        "Llama4", "ForCausalLM",
        {**_GROUPED, "head_dim": 8, "attention_chunk_size": 5, "intermediate_size_mlp": 32, "num_local_experts": 2,
         "pad_token_id": 0, "num_hidden_layers": 4},
    ),
    "shared layers": ("Gemma3n", "ForCausalLM", {**_SHARED, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6}),
    "shared layers of two sizes": ("Gemma4", "ForCausalLM", {**_SHARED, "global_head_dim": 16}),
    "hybrid of attention and Mamba": (
        "Jamba", "ForCausalLM",
        {**_GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False,
         "mamba_d_state": 4},
    ),
    "hybrid of attention and delta nets": (
        "Qwen3Next", "ForCausalLM",
        {**_DELTA, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "attention beside Mamba 2": (
        "FalconH1", "ForCausalLM", {**_GROUPED, **_MAMBA, "mamba_d_ssm": 64},
    ),
    "three convolutions in files": ("OlmoHybrid", "ForCausalLM", {**_DELTA, "pad_token_id": 0}),
    "MLA and delta nets with gates": ("KimiLinear", "ForCausalLM", _KIMI),
    "delta nets with a dense output": ("BailingHybrid", "ForCausalLM", _KIMI),
    "layers that share attention weights": (
        "Zamba2", "ForCausalLM", {**_ZAMBA2, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid"]},
    ),
    "layers that share two attentions": (
        "Zamba2", "ForCausalLM",
        {**_ZAMBA2, "num_mem_blocks": 2, "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid"]},
    ),
    "Mamba and shared attention": (
        "Zamba", "ForCausalLM", {**_ZAMBA, "n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "layers that run several times": ("HrmText", "ForCausalLM", {**_SMALL, "num_hidden_layers": 2, "head_dim": 8}),
    "lightning attention": (
        "MiniMax", "ForCausalLM",
        {**_GROUPED, "head_dim": 8, "num_hidden_layers": 4, "num_local_experts": 2, "block_size": 4},
    ),
    "convolutions of queries and keys": ("Zaya", "ForCausalLM", {**_GROUPED, "head_dim": 8, "num_experts": 2}),
    "convolutions in float32": (
        "Inkling", "ForCausalLM",
        {**_GROUPED, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
         "sliding_window_size": 5, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
    ),
    "experts of queries": (
        "JetMoe", "ForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8,
         "intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "convolutions": ("Lfm2", "ForCausalLM", {**_GROUPED, "full_attn_idxs": [2]}),
    "Mamba": ("Mamba", "ForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "Mamba 2": (
        "Mamba2", "ForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4, "head_dim": 16,
         "n_groups": 2, "chunk_size": 4},
    ),
    "encoder and decoder": (
        "T5", "ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_ff": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    ),
    "encoder of a fixed length": (
        "Whisper", "ForConditionalGeneration",
        {**_SEQ2SEQ, "max_source_positions": 20, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1},
    ),
    "a decoder of BERT's form": ("Bert", "LMHeadModel", {**_SMALL, "is_decoder": True}),
}  # fmt: skip
_PARTS = {
    "conv_states": {"conv_state"}, "recurrent_states": {"ssm_state"}, "indexer_keys": {"indexer"}, "keys": {"k", "latent"},
    "values": {"v", "rope"},
}  # fmt: skip


def make(architecture: str) -> nn.Module:
    family, task, settings = ARCHITECTURES[architecture]
    config_name = f"{family}TextConfig" if hasattr(transformers, f"{family}TextConfig") else f"{family}Config"
    return getattr(transformers, family + task)(getattr(transformers, config_name)(**settings)).eval()


def real_cache(module: nn.Module) -> Iterator[tuple[int, str, bool, torch.Tensor]]:
    """Run the module, and yield (layer, attribute, whether of cross attention, tensor) of each tensor of its cache."""
    decoded = torch.randint(3, 63, (BATCH, CONTEXT))
    inputs = {"input_ids": decoded}
    if module.config.is_encoder_decoder:
        inputs = {"input_ids": torch.randint(3, 63, (BATCH, ENCODED)), "decoder_input_ids": decoded}
    if module.config.model_type == "whisper":
        inputs = {"input_features": torch.randn(BATCH, 8, 40).to(module.dtype), "decoder_input_ids": decoded}
    with torch.no_grad():
        output = module(**inputs, use_cache=True)
    cache = cache_of(output)
    of_encoders = [getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)]
    for index, held in enumerate(getattr(cache, "linear_cache", ())):  # MiniMax's
        if len(held):
            yield index, "recurrent_states", False, held
    for cross, one in enumerate(of_encoders):
        for index, layer in enumerate(one.layers if one is not None else ()):
            for attribute in _PARTS:
                held = getattr(layer, attribute, None)
                for tensor in held.values() if isinstance(held, dict) else [held]:
                    if tensor is not None and tensor.numel():
                        yield index, attribute, bool(cross), tensor


def header_tree(module: Any) -> Tree:
    """The tree of what `save_pretrained` writes: weights that modules share once, some under other names than the module's."""
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        saved = load_file(Path(folder, "model.safetensors"))
    return from_tensors(TensorInfo(name, tuple(tensor.shape), "float32") for name, tensor in saved.items())


def from_headers(module: nn.Module) -> KVCache:
    """Return the KV cache found from names, shapes and config.json as `save_pretrained` would write them."""
    tree = header_tree(module)  # which also writes the dtype into the configuration
    config = json.loads(module.config.to_json_string(use_diff=True)) | {"architectures": [type(module).__name__]}
    return kv_cache(tree, config)


def _context(tensor: KVCacheTensor) -> int:
    return ENCODED if tensor.source == "encoder" else CONTEXT


def _nbytes(cache: KVCache, dtype: str) -> int:
    return sum(tensor.nbytes(dtype, _context(tensor), BATCH) for tensor in cache.tensors)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kv_cache_sizes_equal_those_of_the_cache_of_transformers(architecture: str) -> None:
    module = make(architecture)
    found = from_headers(module)
    assert found.none_because is None

    real = list(real_cache(module))
    assert _nbytes(found, "float32") == sum(tensor.nbytes for *_, tensor in real)
    if architecture not in ("layers that run several times", "convolutions in float32"):  # these list several as one
        expected = sorted((*place, tensor.numel()) for *place, tensor in real)
        listed = sorted(
            (tensor.layer, attribute, tensor.source == "encoder", tensor.elements(_context(tensor), BATCH))
            for tensor in found.tensors
            for attribute, parts in _PARTS.items()
            if tensor.part in parts and tensor.shared_with is None
        )
        assert listed == expected

    modules = dict(module.named_modules())
    live = kv_cache(tree_of(module), module.config.to_dict())
    for tensor in live.tensors:
        assert getattr(modules[tensor.module], "layer_idx", tensor.layer) in (tensor.layer, None, -1)
    renamed = {"delta nets with a dense output": "attention", "layers that run several times": "attn"}
    as_in_modules = [
        replace(tensor, name=tensor.name.replace(f".{old}.", ".self_attn."))
        if (old := renamed.get(architecture))
        else tensor
        for tensor in found.tensors
    ]
    assert sorted(live.tensors, key=repr) == sorted(as_in_modules, key=repr)
    assert (live.notes, live.dtype, live.longest) == (found.notes, found.dtype, found.longest)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cache_of_a_bfloat16_model_has_the_bytes_of_the_real_cache(architecture: str) -> None:
    """Most recurrent states are in float32 all the same, and convolutions and MiniMax's states are not."""
    module = make(architecture).to(torch.bfloat16)
    assert _nbytes(from_headers(module), "bfloat16") == sum(tensor.nbytes for *_, tensor in real_cache(module))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_rwkv_equal_those_that_its_modules_return(dtype: str) -> None:
    """It keeps them in a list, not in transformers' cache."""
    settings = transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3)
    module = transformers.RwkvForCausalLM(settings).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        state = module(torch.randint(3, 63, (BATCH, CONTEXT)), use_cache=True).state
    assert _nbytes(from_headers(module), dtype) == sum(tensor.nbytes for tensor in state)


BY_HAND = {
    # Elements of one sequence: (convolutions, recurrences), each (layers, channels, numbers of a channel).
    "Mamba": ((2, 64, 4), (2, 64, 4)),
    "Mamba 2": ((2, 64 + 2 * 2 * 4, 4), (2, 4 * 16, 4)),
    "hybrid of attention and Mamba": ((2, 64, 4), (2, 64, 4)),
    "hybrid of attention and delta nets": ((3, 2 * 2 * 4 + 4 * 8, 4), (3, 4 * 4, 8)),
    "attention beside Mamba 2": ((3, 64 + 2 * 4, 4), (3, 8 * 8, 4)),
    "MLA and delta nets with gates": ((1, 3 * 4 * 8, 4), (1, 4 * 8, 8)),
    "Mamba and shared attention": ((6, 64, 4), (6, 64, 4)),
    "lightning attention": ((0, 0, 0), (2, 4 * 8, 8)),
    "convolutions": ((2, 32, 3), (0, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("architecture", BY_HAND)
def test_bytes_of_recurrent_states_in_a_format_equal_those_by_hand(architecture: str) -> None:
    module = make(architecture).to(torch.bfloat16)
    convolutions, recurrences = map(math.prod, BY_HAND[architecture])
    tree = header_tree(module)
    tree.kv_cache = found = from_headers(module)

    def nbytes(*rules: str) -> int:
        caches = make_plan(tree, Recipe.of(map(Rule.parse, rules))).caches
        forms = ((each, caches.get(each.name, written_in(each, "bfloat16"))) for each in found.states)
        return sum(cache_tensor_bytes(each, form, CONTEXT, BATCH) for each, form in forms)

    of_recurrence = 2 if architecture == "lightning attention" else 4  # which runs in the model's dtype
    assert nbytes() == BATCH * (2 * convolutions + of_recurrence * recurrences)
    assert nbytes("*.kv_cache=f32") == BATCH * 4 * (convolutions + recurrences)
    if recurrences:
        assert nbytes("*.ssm_state=bf16") == BATCH * 2 * (convolutions + recurrences)
        assert nbytes("*.ssm_state=f16@stochastic", "*.kv_cache=fp8") == BATCH * 2 * (convolutions + recurrences)
    if convolutions:
        assert nbytes("*.conv_state=f32") == BATCH * (4 * convolutions + of_recurrence * recurrences)
    assert nbytes() == sum(tensor.nbytes for _, attribute, _, tensor in real_cache(module) if "state" in attribute)


def test_layers_that_share_a_kv_cache_name_the_layer_that_holds_it() -> None:
    tensors = {tensor.name: tensor for tensor in from_headers(make("shared layers")).tensors}
    assert tensors["model.layers.5.self_attn.kv_cache.k"].shared_with == "model.layers.3.self_attn.kv_cache.k"
    assert tensors["model.layers.4.self_attn.kv_cache.v"].shared_with == "model.layers.2.self_attn.kv_cache.v"
    assert tensors["model.layers.4.self_attn.kv_cache.v"].elements(1000) == 0
    assert tensors["model.layers.3.self_attn.kv_cache.v"].shared_with is None


def test_cache_size_of_recurrent_gemma_includes_recurrent_states() -> None:
    """Modules hold the recurrent states, not the cache of transformers."""
    settings = {**_GROUPED, "head_dim": 8, "lru_width": 32, "attention_window_size": 5}
    module = transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**settings)).eval()
    cache = transformers.DynamicCache(config=module.config)
    with torch.no_grad():
        module(input_ids=torch.randint(3, 63, (BATCH, CONTEXT)), **{cache_argument(module): cache})
    block: Any = module.model.layers[0].temporal_block
    held = cache.layers[2].keys.numel() + cache.layers[2].values.numel()
    held += 2 * (block.conv1d_state.numel() + block.rg_lru.recurrent_states.numel())
    assert sum(tensor.elements(CONTEXT, BATCH) for tensor in from_headers(module).tensors) == held


def _llama(**config: Any) -> KVCache:
    module = make("grouped heads")
    settings = module.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "layer_types": None} | config
    return kv_cache(header_tree(module), settings)


def test_kv_cache_size_ignores_the_sliding_window_of_an_unknown_model_type() -> None:
    found = _llama(sliding_window=5, model_type="another")
    assert _nbytes(found, "bfloat16") == _nbytes(_llama(), "bfloat16")
    assert "sliding window of 5 tokens" in found.notes[0]
    assert not _llama().notes


def test_layers_beyond_num_hidden_layers_are_ignored_with_a_note() -> None:
    found = _llama(num_hidden_layers=2)
    assert {tensor.layer for tensor in found.tensors} == {0, 1}
    assert "without the cache of 1 layer after the last of 2" in found.notes[0]


def test_kv_cache_is_not_computed_if_head_counts_are_missing_from_the_config() -> None:
    module = make("fused projection")
    found = kv_cache(header_tree(module), {"architectures": ["GPT2LMHeadModel"], "n_layer": 2})
    assert found.tensors == ()
    assert "transformer.h.0.attn and 1 module more" in str(found.none_because)


def test_model_that_does_not_generate_has_no_kv_cache() -> None:
    module = transformers.BertForMaskedLM(transformers.BertConfig(**_SMALL))
    assert "BertForMaskedLM does not generate text" in str(from_headers(module).none_because)
    assert "no config.json" in str(kv_cache(header_tree(module), None).none_because)


def test_kv_cache_size_with_packed_weights_comes_from_the_config() -> None:
    """The shape of a packed weight is that of its codes, so that config.json decides."""
    module = make("grouped heads")
    packed = [
        TensorInfo(name.replace(".weight", ".qweight") if "_proj" in name else name, (4, *tensor.shape[1:]), "int32")
        for name, tensor in module.state_dict().items()
    ]
    config = module.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    assert kv_cache(from_tensors(packed), config) == kv_cache(header_tree(module), config)
