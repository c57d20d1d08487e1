"""Converted recipes are read by the tools that they are for, if these are installed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from dtype_engine import Recipe, Rule
from dtype_engine.core import dtypes
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.targets import Context, Conversion, target_named, torchao
from dtype_engine.runtime.model.module_tree import tree_of
from dtype_engine.runtime.numerics.quantize import values_in

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.gate = nn.Linear(32, 32)
        self.gate_proj = nn.Linear(32, 32, bias=False)
        self.down = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.gate_proj(self.norm(self.gate(x))))


class Net(nn.Module):
    """Has enough layers that the layers 1 and 10 can be mistaken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.head = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


RULES = (
    Rule("type:Linear", "float8_e4m3fn"),
    Rule("*.bias", "stored"),
    Rule("layers.1", "stored"),
    Rule("*.gate", "stored"),
    Rule("layers.{3,10}.gate_proj", "int8"),
    Rule("layers.{5..7}.down.weight", "float8_e4m3fn@tensor"),
    Rule("head", "stored"),
    Rule("layers.2.down.weight", "int8@tensor"),
)


def converted(target: str, model: nn.Module, *rules: Rule, model_type: str | None = None) -> tuple[Context, Conversion]:
    tree = tree_of(model)
    context = Context(tree, make_plan(tree, Recipe(rules or RULES)), "net", model_type)
    return context, target_named(target).convert(context)


def torchao_config(written: Conversion) -> Any:
    return json.loads(written.text)["quantization_config"]["quant_type"]["default"]


def torchao_dtype(tensor: torch.Tensor) -> str:
    data, scale = getattr(tensor, "qdata", None), getattr(tensor, "scale", None)
    if data is None or scale is None:
        return str(tensor.dtype).removeprefix("torch.")
    return str(data.dtype).removeprefix("torch.") + ("@tensor" if scale.numel() == 1 else "")


def test_torchao_quantizes_by_the_converted_recipe_as_planned() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.core.config import config_from_dict, config_to_dict

    model = Net()
    rules = (*RULES, Rule("embed", "int8"), Rule("layers.8.gate_proj", "float8_e5m2"))
    context, written = converted("torchao", model, *rules)
    assert written.left_out == ()
    config = config_from_dict(torchao_config(written))
    assert config_to_dict(config) == torchao_config(written)
    quantization.quantize_(model, config, filter_fn=None)
    for name, parameter in model.named_parameters():
        assert torchao_dtype(parameter.data) == context.plan.dtypes[name], name
    assert model(torch.tensor([[1, 2]])).isfinite().all()


@pytest.mark.parametrize("dtype", torchao.GROUPED)
def test_torchao_integer_values_are_close_to_those_of_dtype_engine(dtype: str) -> None:
    """The JSON is equal. Values differ by the precision of the scales, which are stored in bfloat16, and near the middle of two
    codes either code may be taken.
    """
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.core.config import config_from_dict, config_to_dict

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64, bias=False), nn.Embedding(16, 128))
    stored = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    context, written = converted("torchao", model, Rule("*", dtype))
    assert written.left_out == ()
    default = torchao_config(written)
    assert config_to_dict(config_from_dict(default)) == default
    quantization.quantize_(model, config_from_dict(default), filter_fn=None)
    for name, parameter in model.named_parameters():
        ours = values_in(stored[name], dtype, torch.float32)
        apart = (parameter.dequantize() - ours).abs()
        width = dtypes.BY_NAME[dtype].blocks.columns  # type: ignore[union-attr]
        assert (apart > 2**-8 * ours.abs() + 1e-7).float().mean() < (0.02 if dtype.startswith("int4") else 0.15), name
        assert (apart <= 1.01 * parameter.scale.repeat_interleave(width, 1)).all(), name
        assert context.plan.dtypes[name] == dtype


@pytest.mark.parametrize("dtype", ["nvfp4", *torchao.SCALING])
def test_torchao_mx_and_nvfp4_values_equal_those_of_dtype_engine(dtype: str) -> None:
    """Its own JSON is ours, and its values are; of NVFP4 but for a few near the middle of two, since it divides what is stored in
    bfloat16 in bfloat16. With quantized activations that runs on no machine without sm100.
    """
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.core.config import config_from_dict, config_to_dict

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64, bias=False), nn.Embedding(16, 128)).bfloat16()
    stored = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tree = tree_of(model)
    context = Context(tree, make_plan(tree, Recipe((Rule("*", dtype),))), "net", activations="weights")
    written = target_named("torchao").convert(context)
    assert [entry.why for entry in written.left_out] == [f"torchao has {dtypes.short_name(dtype)} for Linear only"]
    default = torchao_config(written)
    assert config_to_dict(config_from_dict(default)) == default
    alone = target_named("torchao").convert(Context(context.tree, context.plan, "net"))
    if dtype == "nvfp4":
        default = torchao_config(alone)
        assert config_to_dict(config_from_dict(default)) == default
    else:
        assert "with quantized activations only" in " ".join(entry.why for entry in alone.left_out)
    quantization.quantize_(model, config_from_dict(default), filter_fn=None)
    ours = values_in(stored["0.weight"], dtype, torch.float32)
    theirs = dict(model.named_parameters())["0.weight"].dequantize(torch.float32)  # type: ignore[call-arg]
    apart = (theirs - ours).abs() > 1e-6 * ours.abs()
    assert float(apart.float().mean()) <= (0.002 if dtype == "nvfp4" else 0.0)


def test_transformers_loads_with_the_converted_torchao_config(make_llama: Callable[..., Path]) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("accelerate")
    import transformers

    folder = make_llama(tie_word_embeddings=False, num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rules = (
        Rule("*", "bfloat16"),
        Rule("*.mlp", "float8_e4m3fn"),
        Rule("*.1.mlp", "bfloat16"),
        Rule("lm_head", "int8"),
    )
    context, written = converted("torchao", model, *rules)
    settings = json.loads(written.text)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, settings["dtype"]),
        quantization_config=transformers.TorchAoConfig.from_dict(settings["quantization_config"]),
    )
    for name, parameter in loaded.named_parameters():
        assert torchao_dtype(parameter.data) == context.plan.dtypes[name], name


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def scheme(module: nn.Module) -> str | None:
    found: Any = getattr(module, "quantization_scheme", None)
    if found is None or found.weights is None:
        return None
    low = {"float": "float8_e4m3fn", "int": "int8"}[_text(found.weights.type)]
    assert found.weights.num_bits == 8
    assert found.input_activations is None
    return low + {"tensor": "@tensor", "channel": ""}[_text(found.weights.strategy)]


def test_compressed_tensors_quantizes_the_planned_modules() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model = Net()
    context, written = converted("llm-compressor", model)
    assert written.left_out == ()
    modifier = yaml.safe_load(written.text)["quant_stage"]["quant_modifiers"]["QuantizationModifier"]
    quantization.apply_quantization_config(model, quantization.QuantizationConfig(**modifier))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            planned = context.plan.dtypes[f"{name}.weight"]
            assert scheme(module) == (planned if planned != "float32" else None), name


def test_llm_compressor_quantizes_by_the_converted_recipe() -> None:
    recipe = pytest.importorskip("llmcompressor.recipe")
    core = pytest.importorskip("llmcompressor.core")
    model = Net()
    context, written = converted("llm-compressor", model)
    (modifier,) = recipe.Recipe.create_instance(written.text).modifiers
    modifier.initialize(core.State(model=model))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            planned = context.plan.dtypes[f"{name}.weight"]
            assert scheme(module) == (planned if planned != "float32" else None), name
    nothing = converted("llm-compressor", Net(), Rule("*", "float32"))[1]
    assert recipe.Recipe.create_instance(nothing.text).modifiers == []


ROUNDED = (
    Rule("type:Linear", "float8_e4m3fn:gptq"),
    *RULES[1:4],
    Rule("layers.{3,10}.gate_proj", "int8:imatrix"),
    *RULES[5:],
)


def test_compressed_tensors_reads_the_schemes_of_weights_with_roundings() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model = Net()
    context, written = converted("llm-compressor", model, *ROUNDED)
    modifiers = yaml.safe_load(written.text)["quant_stage"]["quant_modifiers"]
    assert set(modifiers) == {"GPTQModifier", "QuantizationModifier"}
    for modifier in modifiers.values():
        config = quantization.QuantizationConfig(config_groups=modifier["config_groups"])
        quantization.apply_quantization_config(model, config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            planned = context.plan.dtypes[f"{name}.weight"]
            assert scheme(module) == (planned if planned != "float32" else None), name
            rounding = context.roundings.get(f"{name}.weight")
            if planned != "float32":
                observer = module.quantization_scheme.weights.observer
                assert (observer == "imatrix_mse") is (rounding is not None)


def test_llm_compressor_rounds_by_gptq_the_planned_modules() -> None:
    recipe = pytest.importorskip("llmcompressor.recipe")
    model = Net()
    context, written = converted("llm-compressor", model, *ROUNDED)
    by_kind = {type(each).__name__: each for each in recipe.Recipe.create_instance(written.text).modifiers}
    assert set(by_kind) == {"GPTQModifier", "QuantizationModifier"}
    gptq = by_kind["GPTQModifier"]
    assert (_text(gptq.actorder), gptq.dampening_frac) == ("static", 0.01)
    matched = {
        name
        for name, _ in model.named_modules()
        for target in gptq.resolved_targets
        if re.match(target.removeprefix("re:"), name)
    }
    assert matched == {name.removesuffix(".weight") for name, each in context.roundings.items() if each == "gptq"}


def test_diffusers_casts_by_the_converted_recipe_as_planned() -> None:
    pytest.importorskip("diffusers")
    model = Net()
    rules = (
        Rule("*", "bfloat16"),
        Rule("type:Linear", "float8_e4m3fn@tensor"),
        Rule("layers.1", "bfloat16"),
        Rule("*.gate", "bfloat16"),
        Rule("head", "float16"),
    )
    context, written = converted("diffusers", model, *rules)
    left_out = {name: entry.instead for entry in written.left_out for name in entry.tensors if entry.part == "dtype"}
    assert set(left_out) == {"head.weight", "head.bias"}
    namespace: dict[str, Any] = {}
    exec(compile(written.text, "snippet", "exec"), namespace)
    namespace["cast"](model)
    for name, parameter in model.named_parameters():
        planned = left_out.get(name, context.plan.dtypes[name]).removesuffix("@tensor")
        assert str(parameter.dtype) == f"torch.{planned}", name
    assert model(torch.tensor([[1, 2]])).dtype == torch.bfloat16


def test_modelopt_enables_the_planned_quantizers() -> None:
    modelopt = pytest.importorskip("modelopt.torch.quantization")
    model = Net()
    rules = (*RULES, Rule("embed", "int8"))
    context, written = converted("modelopt", model, *rules)
    assert written.left_out == ()
    names = dict(context.plan.dtypes)
    modelopt.quantize(model, json.loads(written.text), forward_loop=lambda net: net(torch.tensor([[1, 2]])))
    seen = 0
    for name, module in model.named_modules():
        if type(module).__name__ != "TensorQuantizer":
            continue
        owner, _, kind = name.rpartition(".")
        planned = names[f"{owner}.weight"]
        if kind != "weight_quantizer" or planned == "float32":
            assert not module.is_enabled, name
            continue
        low = "int8" if module.num_bits == 8 else "float8_e4m3fn"
        assert module.is_enabled
        assert module.num_bits in (8, (4, 3))
        assert low + ("@tensor" if module.axis is None else "") == planned, name
        assert module.amax.numel() == (1 if module.axis is None else module.amax.shape[0])
        seen += 1
    assert seen == sum(dtype != "float32" for dtype in names.values())


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_gguf_names_of_tensors_are_found_by_model_type(model_type: str) -> None:
    from dtype_engine.recipe.targets.llama_cpp import name_map

    lookup = name_map("net", model_type, 12)
    moe = "moe" in model_type or model_type == "mixtral"
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.11.input_layernorm": "blk.11.attn_norm",
        "model.layers.3.self_attn.q_proj": "blk.3.attn_q",
        "model.layers.3.self_attn.o_proj": "blk.3.attn_output",
        "model.layers.3.post_attention_layernorm": "blk.3.ffn_norm",
    }
    mlp = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    experts = {f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
    names |= {f"model.layers.1.{name}": f"blk.1.{theirs}" for name, theirs in (experts if moe else mlp).items()}
    assert {name: lookup(name) for name in names} == names


def test_llama_cpp_lines_match_gguf_names() -> None:
    import gguf
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=12, num_attention_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    rules = (Rule("*", "bfloat16"), Rule("type:LlamaRMSNorm", "float32"), Rule("model.layers.1", "float16"))
    context, written = converted("llama.cpp", model, *rules, model_type="llama")
    lookup = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 12)
    lines = [line.rpartition("=") for line in written.text.split()]
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    for name in context.tree.tensors:
        if name.endswith("norm.weight") or "inv_freq" in name:
            continue
        hits = [type_ for pattern, _, type_ in lines if re.search(pattern, lookup.get_name(name, (".weight",)))]
        assert hits == [short[context.plan.dtypes[name]]], name


VLLM_RECIPES: dict[str, tuple[Rule, ...]] = {
    "one scheme": (Rule("type:Linear", "float8_e4m3fn"),),
    "without some": (Rule("type:Linear", "fp8@128x128"), Rule("*.o_proj", "bfloat16"), Rule("*.layers.3", "bfloat16")),
    "two schemes": (Rule("*.mlp", "mxfp4"), Rule("*.self_attn", "mxfp8")),
    "by layers": (Rule("*.layers.{0..5}.mlp", "mxfp4"), Rule("*.layers.{6..11}.mlp", "float8_e4m3fn@tensor")),
    "experts": (Rule("*.experts", "int8@row"), Rule("*.self_attn", "float8_e4m3fn@fused")),
    "experts by layers": (Rule("*.layers.{0,10}.mlp.experts", "nvfp4"), Rule("*.layers.1.mlp.experts", "mxfp8")),
}
VLLM_NAMES = {
    "float8_e4m3fn": "fp8_per_channel", "float8_e4m3fn@tensor": "fp8_per_tensor", "float8_e4m3fn@fused": "fp8_per_tensor",
    "fp8@128x128": "fp8_per_block", "int8@row": "int8_per_channel_weight_only", "nvfp4": "nvfp4_per_token",
}  # fmt: skip
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""vLLM's `packed_modules_mapping` for Llama and Qwen3."""


def small_model(experts: bool) -> nn.Module:
    """Return a model of 12 layers without values: Qwen3's with experts, or Llama's."""
    import transformers

    small: dict[str, Any] = {"vocab_size": 32, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 12}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    with torch.device("meta"):
        if experts:
            sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**small, **sizes)).to(torch.bfloat16)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).to(torch.bfloat16)


@pytest.mark.parametrize("recipe", VLLM_RECIPES)
def test_vllm_reads_its_configuration_and_finds_the_planned_scheme_of_every_layer(recipe: str) -> None:
    config = pytest.importorskip("vllm.config.quantization")
    patterns = pytest.importorskip("vllm.model_executor.layers.quantization.utils.config_utils")
    model = small_model(recipe.startswith("experts"))
    context, written = converted("vllm", model, *VLLM_RECIPES[recipe])
    args = config.QuantizationConfigArgs(**json.loads(written.text))
    assert (args.linear, args.moe, args.ignore) == (None, None, [])
    planned = context.plan.dtypes
    found: dict[str, int] = {}
    for layer in range(12):
        at = f"model.layers.{layer}"
        for local, weight in (
            ("self_attn.qkv_proj", "self_attn.k_proj.weight"),
            ("self_attn.o_proj", "self_attn.o_proj.weight"),
            ("mlp.gate_up_proj", "mlp.up_proj.weight"),
            ("mlp.down_proj", "mlp.down_proj.weight"),
            ("mlp.experts", "mlp.experts.down_proj"),
            ("mlp.gate", "mlp.gate.weight"),
        ):
            if f"{at}.{weight}" not in planned:
                continue
            matched = patterns.find_matching_patterns(f"{at}.{local}", args.targets, PACKED, use_fnmatch=True)
            schemes = {args.targets[pattern] for each in matched for pattern in each}
            form = planned[f"{at}.{weight}"]
            wanted = set() if form == "bfloat16" else {VLLM_NAMES.get(form, form)}
            assert schemes == wanted, f"{at}.{local}"
            assert all(len(each) == len(wanted) for each in matched), "a pattern for each part of a fused layer"
            for scheme in schemes:
                found[scheme] = found.get(scheme, 0) + 1
    assert sum(found.values()) >= 3
    heads = patterns.find_matching_patterns("lm_head", args.targets, PACKED, use_fnmatch=True)
    assert heads == [set()]


SGLANG_RECIPES: dict[str, tuple[Rule, ...]] = {
    "one scheme": (Rule("type:Linear", "float8_e4m3fn"),),
    "without some": (Rule("type:Linear", "mxfp8:rceil"), Rule("*.o_proj", "bfloat16"), Rule("*.layers.3", "bfloat16")),
    "two schemes": (Rule("*.mlp", "mxfp8:rceil"), Rule("*.self_attn", "float8_e4m3fn")),
    "by layers": (Rule("*.layers.{0,1,10}.mlp", "float8_e4m3fn"), Rule("*.layers.{2..5}.self_attn", "float8_e4m3fn")),
    "experts": (
        Rule("*.experts", "float8_e4m3fn"),
        Rule("*.self_attn", "float8_e4m3fn"),
        Rule("*.layers.1", "bfloat16"),
    ),
    "experts alone": (Rule("*.layers.{0,10}.mlp.experts", "nvfp4"),),
}


@pytest.mark.parametrize("recipe", SGLANG_RECIPES)
def test_sglang_leaves_those_layers_wide_that_the_recipe_does(recipe: str) -> None:
    utils = pytest.importorskip("sglang.srt.layers.quantization.utils", exc_type=ImportError)
    context, written = converted("sglang", small_model(recipe.startswith("experts")), *SGLANG_RECIPES[recipe])
    words = shlex.split(written.text)
    scheme = words[words.index("--quantization") + 1]
    ignored = words[0].partition("=")[2].split(",") if "IGNORED" in words[0] else []
    left_out = {name for entry in written.left_out if entry.part == "dtype" for name in entry.tensors}
    skipped = 0
    for layer in range(12):
        at = f"model.layers.{layer}"
        for local, weight in (
            ("self_attn.qkv_proj", "self_attn.k_proj.weight"),
            ("self_attn.o_proj", "self_attn.o_proj.weight"),
            ("mlp.gate_up_proj", "mlp.up_proj.weight"),
            ("mlp.down_proj", "mlp.down_proj.weight"),
            ("mlp.experts", "mlp.experts.down_proj"),
        ):
            if (name := f"{at}.{weight}") not in context.plan.dtypes:
                continue
            wide = context.plan.dtypes[name] == "bfloat16" or name in left_out
            if scheme == "nvfp4_online" and local != "mlp.experts":
                assert wide, "SGLang does not compare the names of linear layers with this scheme"
                continue
            assert utils.is_layer_skipped(f"{at}.{local}", ignored, PACKED) == wide, f"{at}.{local}"
            assert utils.is_layer_skipped(f"{at}.{local}", ignored) == wide, f"{at}.{local}"
            skipped += wide
    assert bool(skipped) == (recipe != "one scheme")
