"""How the formats of KV caches are passed to runtimes, and which formats runtimes do not support."""

from __future__ import annotations

import json

import msgspec
import pytest

from dtype_engine import Recipe, Rule
from dtype_engine.checkpoint.kv_cache import kv_cache
from dtype_engine.core.errors import UserError
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.kv_serving import cache_serving, modelopt_layers
from dtype_engine.recipe.lint import lint as compare_patterns
from dtype_engine.recipe.presets import preset
from dtype_engine.recipe.serving import lint_serving, serving_lines
from dtype_engine.recipe.targets import Context, target_named

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
    "num_hidden_layers": 4, "model_type": "llama",
}  # fmt: skip
ATTENTION = "model.layers.{}.self_attn"


def _tree(config: dict[str, object] | None = None, layers: int = 4) -> Tree:
    parts = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    tree = from_tensors(
        TensorInfo(f"{ATTENTION.format(layer)}.{part}.weight", (rows, 64), "bfloat16")
        for layer in range(layers)
        for part, rows in parts.items()
    )
    tree.kv_cache = kv_cache(tree, CONFIG | (config or {}))
    return tree


def _plan(tree: Tree, *rules: str) -> dict[str, str]:
    return dict(make_plan(tree, Recipe.of(map(Rule.parse, rules))).caches)


@pytest.mark.parametrize(
    ("runtime", "rules", "flags"),
    [
        ("vllm", ["*.kv_cache=fp8"], "--kv-cache-dtype fp8"),
        ("vllm", ["*.kv_cache=fp8e5", "*.{0,3}.*.kv_cache=bf16"], "--kv-cache-dtype fp8_e5m2 --kv-cache-dtype-skip-layers 0 3"),
        ("vllm", ["*.{1,2}.*.kv_cache=int8@token"], "--kv-cache-dtype int8_per_token_head --kv-cache-dtype-skip-layers 0 3"),
        ("vllm", ["*.kv_cache=bf16"], "--kv-cache-dtype bfloat16"),
        ("vllm", ["*.kv_cache=fp8@tensor+q"], "--kv-cache-dtype fp8"),
        ("vllm", ["*.kv_cache.k=nvfp4+q", "*.kv_cache.v=nvfp4"], "--kv-cache-dtype nvfp4"),
        ("vllm", ["*.kv_cache=int4@token"], "--kv-cache-dtype int4_per_token_head"),
        ("vllm", ["*.kv_cache=tq@k3v4"], "--kv-cache-dtype turboquant_k3v4_nc"),
        ("sglang", ["*.kv_cache=fp8+q"], "--kv-cache-dtype fp8_e4m3"),
        ("sglang", ["*.kv_cache=fp8"], "--kv-cache-dtype fp8_e4m3"),
        ("llama.cpp", ["*.kv_cache.k=int8@token", "*.kv_cache.v=int4@g32"], "-ctk q8_0 -ctv q4_0"),
        ("llama.cpp", ["*.kv_cache.v=f16"], "-ctv f16"),
    ],
)  # fmt: skip
def test_kv_cache_formats_become_options_of_the_runtime(runtime: str, rules: list[str], flags: str) -> None:
    tree = _tree()
    served = cache_serving(tree, _plan(tree, *rules), runtime)
    assert " ".join(served.flags) == flags
    assert not any(problem.refused for problem in served.problems)


@pytest.mark.parametrize(
    ("runtime", "rules", "why"),
    [
        ("vllm", ["*.kv_cache=int4@kivi"], "vLLM has no KV cache in int4@kivi"),
        ("vllm", ["*.kv_cache=fp8", "*.kv_cache.v=nvfp4"], "one format for the keys and the values of a layer"),
        ("vllm", ["*.kv_cache=fp8", "*.0.*.kv_cache=nvfp4"], "one format for all layers, but those that stay wide"),
        ("sglang", ["*.{0,1}.*.kv_cache=fp8"], "SGLang has one format for all layers"),
        ("sglang", ["*.kv_cache=int8@token"], "SGLang has no KV cache in int8@token"),
        (
            "llama.cpp",
            ["*.kv_cache=f16", "*.0.*.kv_cache.k=bf16"],
            "llama.cpp has one format for the keys of all layers",
        ),
        ("llama.cpp", ["*.kv_cache=fp8"], "llama.cpp has no KV cache in fp8"),
    ],
)
def test_kv_cache_formats_that_a_runtime_does_not_support_are_refused(runtime: str, rules: list[str], why: str) -> None:
    tree = _tree()
    served = cache_serving(tree, _plan(tree, *rules), runtime)
    assert served.flags == ()
    assert [problem.refused for problem in served.problems] == [True]
    assert why in served.problems[0].why
    assert set(served.problems[0].tensors) <= set(tree.caches)


@pytest.mark.parametrize(
    ("runtime", "rules", "reasons"),
    [
        ("vllm", ["*.kv_cache=fp8"], ["vLLM also rounds queries where its attention computes in fp8"]),
        ("vllm", ["*.kv_cache=nvfp4"], ["on Hopper and Blackwell GPUs: nvfp4+q measures it"]),
        ("sglang", ["*.kv_cache=fp8"], ["SGLang also rounds queries where"]),
        ("vllm", ["*.kv_cache=fp8@head"], ["its scales are read from a checkpoint", "Blackwell GPUs: fp8@head+q measures it"]),
        ("vllm", ["*.kv_cache=fp8@head+q"], ["its scales are read from a checkpoint"]),
        *(("vllm", [f"*.kv_cache={form}"], []) for form in ("fp8+q", "nvfp4+q", "fp8e5", "bf16", "int4@token", "int8@token")),
        ("vllm", ["*.kv_cache=tq@k8v4"], ["unrounded keys", "leaves the first 2 and the last 2 layers unrounded"]),
        ("vllm", ["*.{1..2}.*.kv_cache=tq@k8v4"], ["unrounded keys", "leaves the first 2 and the last 2 layers"]),
    ],
)  # fmt: skip
def test_lint_says_where_a_runtime_computes_otherwise_with_kv_caches(
    runtime: str, rules: list[str], reasons: list[str]
) -> None:
    tree = _tree()
    problems = cache_serving(tree, _plan(tree, *rules), runtime).problems
    assert len(problems) == len(reasons)
    for problem, reason in zip(problems, reasons, strict=True):
        assert reason in problem.why
        assert problem.effect == "other values"
        assert set(problem.tensors) <= set(tree.caches)
    if runtime == "vllm" and rules == ["*.kv_cache=fp8"]:
        finding = lint_serving(Context(tree, make_plan(tree, Recipe.of(map(Rule.parse, rules)))), "vllm").findings[0]
        assert finding.source == "vllm/model_executor/layers/attention/attention.py: Attention.forward"


def test_turboquant_of_the_layers_that_vllm_rounds_has_no_layers_to_report() -> None:
    tree = _tree({"num_hidden_layers": 6}, layers=6)
    caches = _plan(tree, "*.{2,3}.*.kv_cache=tq@k3v3")
    served = cache_serving(tree, caches, "vllm")
    assert " ".join(served.flags) == "--kv-cache-dtype turboquant_3bit_nc --kv-cache-dtype-skip-layers 0 1 4 5"
    assert [problem.tensors for problem in served.problems] == [tuple(caches)]
    everywhere = cache_serving(tree, _plan(tree, "*.kv_cache=tq@k3v3"), "vllm").problems[1]
    layers = {name.split(".")[2] for name in everywhere.tensors}
    assert layers == {"0", "1", "4", "5"}


def test_lint_and_recipe_conversion_include_kv_caches() -> None:
    tree = _tree()
    plan = make_plan(tree, Recipe.of([Rule.parse("*.kv_cache=fp8")]))
    lines = serving_lines(lint_serving(Context(tree, plan), "vllm"), ", ".join)
    assert "for the KV cache: --kv-cache-dtype fp8" in lines
    plan = make_plan(tree, Recipe.of([Rule.parse("*.kv_cache=fp8@tensor"), Rule.parse("*.1.*.kv_cache.v=nvfp4")]))
    lint = lint_serving(Context(tree, plan), "vllm")
    assert [finding.effect for finding in lint.findings] == ["refused"]
    assert not lint.loads
    written = json.loads(target_named("modelopt").convert(Context(tree, plan)).text)["quant_cfg"]
    bits = {entry["quantizer_name"]: entry["cfg"]["num_bits"] for entry in written if entry["enable"]}
    assert bits == {
        f"{ATTENTION.format(layer)}.{part}_bmm_quantizer": [2, 1] if (layer, part) == (1, "v") else [4, 3]
        for layer in range(4)
        for part in "kv"
    }

    rules = ["*.kv_cache.k=int8@token", "*.kv_cache.v=f16", "*.q_proj=int8"]
    mixed = Context(tree, make_plan(tree, Recipe.of(map(Rule.parse, rules))), model_type="llama")
    reading = compare_patterns(mixed, target_named("llama.cpp"))
    assert reading.caches.flags == ("-ctk", "q8_0", "-ctv", "f16")
    assert [problem.effect for problem in reading.caches.problems] == ["other values"]
    assert reading.differs
    assert [rule.pattern for rule in reading.rules] == ["*.q_proj"]
    left = target_named("torchao").convert(Context(tree, plan)).left_out
    assert {name for entry in left for name in entry.tensors} == set(plan.caches)


@pytest.mark.parametrize(
    ("quantization", "rules"),
    [
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
            ["*.kv_cache=float8_e4m3fn@tensor"],
        ),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}, ["*.kv_cache=fp8@head"]),
        ({"kv_cache_quant_algo": "FP8"}, ["*.kv_cache=float8_e4m3fn@tensor"]),
        ({"kv_cache_quant_algo": "NVFP4"}, ["*.kv_cache=nvfp4"]),
        (
            {
                "kv_cache_quant_algo": "MIXED_PRECISION",
                "kv_cache_quantized_layers": {
                    ATTENTION.format(0): {"quant_algo": "FP8"},
                    ATTENTION.format(2): {"quant_algo": "FP8_K_NVFP4_V"},
                    "no*where": {"quant_algo": "FP8"},
                },
            },
            [
                "model.layers.0.self_attn.kv_cache=float8_e4m3fn@tensor",
                "model.layers.2.self_attn.kv_cache.k=float8_e4m3fn@tensor",
                "model.layers.2.self_attn.kv_cache.v=nvfp4",
            ],
        ),
    ],
)
def test_preset_kv_declared_has_the_kv_cache_formats_of_the_config(
    quantization: dict[str, object], rules: list[str]
) -> None:
    tree = _tree({"quantization_config": quantization})
    recipe = preset("kv-declared").recipe(tree)
    assert [str(rule) for rule in recipe.rules] == rules
    layers = quantization.get("kv_cache_quantized_layers")
    if isinstance(layers, dict):
        found, left = modelopt_layers(tree, make_plan(tree, recipe).caches)
        assert found == {name: layers[name] for name in layers if "*" not in name}
        assert left == ()


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"kv_cache_scheme": {"num_bits": 4, "type": "int", "strategy": "tensor"}}, "int4"),
        ({"kv_cache_quant_algo": "NVFP4_4OVER6"}, "NVFP4_4OVER6"),
        ({"kv_cache_quantized_layers": {ATTENTION.format(1): {"quant_algo": "INT8"}}}, "INT8"),
    ],
)
def test_preset_kv_declared_names_a_declared_format_that_is_not_measured(quantization: object, name: str) -> None:
    with pytest.raises(UserError, match=rf"^config\.json declares KV caches in {name}, which can't be measured$"):
        preset("kv-declared").recipe(_tree({"quantization_config": quantization}))


@pytest.mark.parametrize(
    "quantization",
    [{}, {"kv_cache_scheme": None}, {"kv_cache_quant_algo": []}, "fp8", {"kv_cache_quantized_layers": {"a": 1}}],
)
def test_preset_kv_declared_is_refused_without_a_known_format_in_the_config(quantization: object) -> None:
    with pytest.raises(UserError) as raised:
        preset("kv-declared").recipe(_tree({"quantization_config": quantization}))
    assert "it declares no formats of KV caches" in str(raised.value)


def _hybrid(*, attention: bool = True, convolution: bool = True) -> Tree:
    """Two layers of Mamba and, if wanted, the layers of attention of `_tree` after them."""
    mixer = {"A_log": (64, 8), "in_proj.weight": (128, 32), "out_proj.weight": (32, 64), "conv1d.weight": (64, 1, 4)}
    tensors = [
        TensorInfo(f"model.layers.{layer}.mixer.{name}", shape, "bfloat16")
        for layer in (4, 5)
        for name, shape in mixer.items()
    ]
    tree = from_tensors([*(_tree().tensors.values() if attention else ()), *tensors])
    tree.kv_cache = kv_cache(tree, CONFIG | {"num_hidden_layers": 6})
    if not convolution:
        states = tuple(tensor for tensor in tree.kv_cache.tensors if tensor.part != "conv_state")
        tree.kv_cache = msgspec.structs.replace(tree.kv_cache, tensors=states)
    return tree


@pytest.mark.parametrize(
    ("runtime", "rules", "flags"),
    [
        ("vllm", ["*.ssm_state=bf16"], "--mamba-ssm-cache-dtype bfloat16"),
        ("vllm", ["*.conv_state=f16"], "--mamba-cache-dtype float16 --mamba-ssm-cache-dtype float32"),
        ("vllm", ["*.{conv,ssm}_state=bf16"], "--mamba-cache-dtype bfloat16 --mamba-ssm-cache-dtype bfloat16"),
        ("vllm", ["*.ssm_state=f16@stochastic"],
         "--mamba-ssm-cache-dtype float16 --enable-mamba-cache-stochastic-rounding"),
        ("vllm", ["*.kv_cache.{k,v}=fp8", "*.ssm_state=f16"], "--kv-cache-dtype fp8 --mamba-ssm-cache-dtype float16"),
        ("sglang", ["*.ssm_state=bf16"], "--mamba-ssm-dtype bfloat16"),
        ("sglang", ["*.ssm_state=f16@stochastic", "*.{k,v}=fp8"],
         "--kv-cache-dtype fp8_e4m3 --mamba-ssm-dtype float16 --enable-mamba-cache-stochastic-rounding"),
        ("sglang", ["*.conv_state=bf16"], "--mamba-ssm-dtype float32"),
        ("llama.cpp", ["*.ssm_state=f32"], ""),
        ("llama.cpp", ["*.ssm_state=f32", "*.k=f16"], "-ctk f16"),
    ],
)  # fmt: skip
def test_formats_of_recurrent_states_become_options_of_the_runtime(runtime: str, rules: list[str], flags: str) -> None:
    tree = _hybrid()
    served = cache_serving(tree, _plan(tree, *rules), runtime)
    assert " ".join(served.flags) == flags
    assert not any(problem.refused for problem in served.problems)


def test_state_of_a_model_without_convolutions_has_the_option_for_all_states() -> None:
    """MiniMax's lightning attention, whose states vLLM keeps in the dtype of `--mamba-cache-dtype`."""
    tree = _hybrid(attention=False, convolution=False)
    served = cache_serving(tree, _plan(tree, "*.ssm_state=bf16"), "vllm")
    assert " ".join(served.flags) == "--mamba-cache-dtype bfloat16"


@pytest.mark.parametrize(
    ("runtime", "rules", "why"),
    [
        ("vllm", ["*.4.*.ssm_state=bf16"], "vLLM has one dtype for the recurrences of all layers"),
        ("sglang", ["*.4.*.conv_state=f16", "*.5.*.conv_state=bf16"], "SGLang has one dtype for the convolutions"),
        ("llama.cpp", ["*.ssm_state=bf16"], "llama.cpp keeps recurrent states in float32"),
    ],
)
def test_formats_of_recurrent_states_that_a_runtime_lacks_are_refused(runtime: str, rules: list[str], why: str) -> None:
    tree = _hybrid()
    served = cache_serving(tree, _plan(tree, *rules), runtime)
    assert served.flags == ()
    assert [problem.refused for problem in served.problems] == [True]
    assert why in served.problems[0].why
    assert {name.rpartition(".")[2] for name in served.problems[0].tensors} <= {"conv_state", "ssm_state"}


def test_what_a_runtime_does_otherwise_with_states_is_named() -> None:
    tree = _hybrid()
    plan = make_plan(tree, Recipe.of([Rule.parse("*.ssm_state=f16@stochastic"), Rule.parse("*.conv_state=bf16")]))
    lines = serving_lines(lint_serving(Context(tree, plan), "sglang"), ", ".join)
    assert any("set SGLANG_MAMBA_CONV_DTYPE=bfloat16" in line for line in lines)
    assert any("draws other random numbers" in line for line in lines)
    assert lines[-1].endswith("--mamba-ssm-dtype float16 --enable-mamba-cache-stochastic-rounding")
    converted = target_named("modelopt").convert(Context(tree, plan))
    assert {name for entry in converted.left_out for name in entry.tensors} == set(plan.caches)
    llama = compare_patterns(Context(tree, plan, model_type="llama"), target_named("llama.cpp"))
    assert [problem.effect for problem in llama.caches.problems] == ["refused"]
