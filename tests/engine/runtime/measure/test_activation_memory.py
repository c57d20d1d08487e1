"""The memory of activations against what torch's allocators hand out, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tests.helpers.transformers_caches import cache_of
from torch import nn

from dtype_engine.core.errors import NoForward
from dtype_engine.runtime.measure import activation_memory
from dtype_engine.runtime.measure.activation_memory import ActivationEstimator, measured

BATCH = 2
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "experts": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "mamba": (
        "Mamba2ForCausalLM", "Mamba2Config",
        {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 32, "n_groups": 2,
         "chunk_size": 64},
    ),
    "encoder": ("BertForMaskedLM", "BertConfig", _SMALL),
    "encoder and decoder": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 512, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "decoder_start_token_id": 0},
    ),
    "latents": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**_SMALL, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
         "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
         "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "window": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, "head_dim": 16, "sliding_window": 64}),
    "experts and delta nets": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {**_GROUPED, "num_hidden_layers": 4, "head_dim": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
         "num_experts": 4, "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 16},
    ),
    "experts and Mamba": (
        "JambaForCausalLM", "JambaConfig",
        {**_GROUPED, "hidden_size": 192, "intermediate_size": 384, "attn_layer_period": 2, "attn_layer_offset": 1,
         "num_experts": 4, "use_mamba_kernels": False, "mamba_d_state": 8},
    ),
    "all experts": (
        "GraniteMoeForCausalLM", "GraniteMoeConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "position table": (
        "GPTJForCausalLM", "GPTJConfig", {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    ),
    "pictures": ("ViTForImageClassification", "ViTConfig", {**_SMALL, "image_size": 224}),
}  # fmt: skip


def context_of(name: str) -> int:
    """Return the number of tokens to run a model over: fewer, but wider ones, if it loops over them."""
    return 64 if name == "experts and Mamba" else 192


_WIDENED = {
    "experts and Mamba": 4 * BATCH * context_of("experts and Mamba") * 384,
    "position table": 4 * BATCH * context_of("position table") * 3 * 64,
}
"""The bytes of the float32 copies that a CPU makes, at the peak, of operands in 16 bits beside others in float32. There is no other
workspace at these peaks.
"""


def make(name: str) -> nn.Module:
    model, config, settings = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()


def without_data(module: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return type(module)(copy.deepcopy(module.config))


def inputs_of(module: nn.Module, context: int, device: str) -> dict[str, Any]:
    if module.main_input_name == "pixel_values":
        return {"pixel_values": torch.zeros(BATCH, 3, 224, 224, device=device, dtype=module.dtype)}
    tokens = torch.randint(3, 500, (BATCH, context), device=device)
    if module.config.is_encoder_decoder:
        return {"input_ids": tokens, "decoder_input_ids": tokens, "use_cache": True}
    last = {} if module.config.model_type == "bert" else {"use_cache": True, "logits_to_keep": 1}
    return {"input_ids": tokens} | last


def allocated_peak(module: nn.Module, context: int, device: str) -> tuple[int, int]:
    """Return the peak of what the device's allocator handed out in a pass, beside what was there before, and how much of it was the
    KV cache that the pass leaves, in bytes.
    """
    inputs = inputs_of(module, context, device)
    with torch.no_grad():
        cache = cache_bytes(module(**inputs))
        if device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            module(**inputs)
            return torch.cuda.max_memory_allocated() - before, cache
        with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
            output = module(**inputs)
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del output
    return peak, cache


def cache_bytes(output: Any) -> int:
    """Return the bytes of the KV cache in the output of a pass, by hand for these models."""
    cache = cache_of(output)
    sides = [getattr(cache, side, None) for side in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for side in sides if side is not None for layer in side.layers] or getattr(cache, "layers", [])
    held: list[Any] = []
    for layer in layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            value = getattr(layer, name, None)
            held += value.values() if isinstance(value, dict) else [value]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA"))])  # fmt: skip
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in MODELS), *((name, "bfloat16") for name in ("latents", "pictures"))],
)
def test_measured_activation_peak_equals_that_of_the_allocator(name: str, dtype: str, device: str) -> None:
    """Also in bfloat16, where kernels on a CPU take workspace."""
    module, context = make(name).to(device, getattr(torch, dtype)), context_of(name)
    found = measured(module, context, BATCH)
    peak, cache = allocated_peak(module, context, device)
    assert found.nbytes + cache == pytest.approx(peak, rel=0.005)
    assert found.module in dict(module.named_modules())
    assert not found.estimated


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in MODELS),
        *((name, "bfloat16") for name in MODELS if "experts" in name or name in ("latents", "position table")),
        *((name, "float16") for name in ("experts", "all experts")),
    ],
)
def test_activation_estimate_is_a_close_upper_bound(name: str, dtype: str) -> None:
    """Up to the workspace of kernels, of which attention on a CPU has some for each thread. Norms, softmax, routers and states of
    models in bfloat16 are in float32, so that a model in float32 needs less than twice as much.
    """
    module = make(name).to(getattr(torch, dtype))
    if name == "position table":
        for layer in module.modules():
            if hasattr(layer, "embed_positions"):  # transformers 5.24 has none
                layer.embed_positions = layer.embed_positions.float()  # as `from_pretrained` leaves it
    real = measured(module, context_of(name), BATCH)
    found = ActivationEstimator(without_data(module), getattr(torch, dtype)).estimate(context_of(name), BATCH)
    workspace = (64 << 10) * torch.get_num_threads()
    if dtype != "float32":
        workspace = _WIDENED.get(name, workspace)
    assert real.nbytes - workspace <= found.nbytes <= 1.05 * real.nbytes
    assert found.module == real.module
    assert found.estimated


def test_activation_estimate_of_a_loop_over_tokens_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the estimate for millions of tokens takes no longer than that for some hundred."""
    monkeypatch.setattr(activation_memory, "_LOOPED", (8, 16, 32))  # shorter than in use, for time
    settings = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=8)
    module = transformers.MambaForCausalLM(settings).eval()
    found = ActivationEstimator(without_data(module), torch.float32).estimate(7_000_000, BATCH)
    assert found.nbytes == pytest.approx(25_000 * measured(module, 280, BATCH).nbytes, rel=0.01)
    assert (found.context, found.batch) == (7_000_000, BATCH)


def test_memory_allocated_before_the_pass_is_not_counted_as_activations() -> None:
    module = make("llama")
    before = measured(module, 192, BATCH).nbytes
    ballast = [torch.zeros(1 << 20)]
    module.model.layers[0].register_forward_pre_hook(lambda *_: ballast.clear())
    assert measured(module, 192, BATCH).nbytes == before


def test_activation_estimate_works_for_a_million_tokens() -> None:
    estimator = ActivationEstimator(without_data(make("llama")), torch.bfloat16)
    small, large = estimator.estimate(1000, 1), estimator.estimate(1_000_000, 8)
    assert large.nbytes > 7000 * small.nbytes
    assert large.nbytes > 1 << 32


def test_activation_memory_needs_a_module_with_known_input_sizes() -> None:
    with pytest.raises(NoForward, match="nothing says how large the inputs 'input_ids' of Linear are"):
        measured(nn.Linear(2, 2), 8, 1)
