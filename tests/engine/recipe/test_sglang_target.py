"""What SGLang can't serve of a recipe while it quantizes a checkpoint itself, and the command that it gets."""

from __future__ import annotations

import shlex

import pytest
from tests.engine.recipe.test_vllm_target import tree

from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.recipe.targets import Context, Conversion, target_named

START = ["python", "-m", "sglang.launch_server", "--model-path", "MODEL", "--dtype", "bfloat16"]
SEPARATE = "--disable-shared-experts-fusion"
AT = "model.layers.0"


def context(*rules: str, of: Tree | None = None) -> Context:
    of = of or tree()
    return Context(of, make_plan(of, Recipe.of(map(Rule.parse, rules))), "m")


def converted(*rules: str, of: Tree | None = None) -> Conversion:
    return target_named("sglang").convert(context(*rules, of=of))


@pytest.mark.parametrize(
    ("rule", "weights", "why"),
    [
        ("lm_head=fp8", 1, "SGLang leaves output layers wide"),
        ("*.embed_tokens=fp8", 1, "SGLang quantizes Linear only"),
        ("*.mlp.gate=fp8", 1, "SGLang leaves routers wide"),
        ("*.q_proj=fp8", 1, "SGLang has one scheme for q_proj, k_proj, which it fuses"),
        ("*.{q,k}_proj=int8", 2, "SGLang has no i8"),
        ("*.{q,k}_proj=fp8@128x128", 2, "SGLang has no fp8@128"),
        ("*.{q,k}_proj=nvfp4", 2, "SGLang has nvfp4_online for experts only"),
        ("*.shared_expert=mxfp8", 1, "SGLang needs rows of a multiple of 32 values"),
        ("*.experts.down_proj=fp8", 1, "SGLang has one scheme for all experts of a layer"),
        ("*.experts=mxfp4", 2, "SGLang has no mxfp4"),
        ("*.conv=float32", 1, "SGLang has one dtype for everything it does not quantize, bfloat16 or float16"),
    ],
)
def test_what_sglang_cannot_serve_is_said_in_one_sentence(rule: str, weights: int, why: str) -> None:
    written = converted(rule)
    assert [(entry.why, entry.part, len(entry.tensors)) for entry in written.left_out] == [(why, "dtype", weights)]
    assert {entry.instead for entry in written.left_out} == {"bfloat16"}
    assert written.patterns == ()
    assert written.notes == ("there is nothing to quantize in this plan",)
    assert shlex.split(written.text) == START


def test_scheme_of_most_values_is_the_one_of_the_whole_model() -> None:
    written = converted("*.{q,k}_proj=mxfp8", "*.experts=fp8")
    (entry,) = written.left_out
    assert entry.why == "SGLang has one scheme for the whole model, here fp8"
    assert entry.tensors == (f"{AT}.self_attn.q_proj.weight", f"{AT}.self_attn.k_proj.weight")
    assert shlex.split(written.text)[-3:] == ["--quantization", "fp8", SEPARATE]


def test_layers_that_stay_wide_are_named_and_routers_are_not() -> None:
    variable, *command = shlex.split(converted("*.experts=fp8").text)
    assert command == [*START, "--quantization", "fp8", SEPARATE]
    name, _, ignored = variable.partition("=")
    assert name == "SGLANG_FP8_IGNORED_LAYERS"
    assert ignored.split(",") == [f"{AT}.self_attn", f"{AT}.mlp.shared_expert.down_proj", f"{AT}.conv"]


def test_no_name_is_needed_if_all_linear_layers_have_the_scheme() -> None:
    written = converted("type:Linear=fp8", "*.experts=fp8", of=Tree([], {}))
    assert "IGNORED" not in written.text
    shapes = {f"{AT}.mlp.down_proj": (128, 128), f"{AT}.mlp.up_proj": (128, 128), "lm_head": (96, 128)}
    dense = Tree(
        [TensorInfo(f"{name}.weight", shape, "bfloat16") for name, shape in shapes.items()],
        dict.fromkeys(shapes, "Linear"),
    )
    assert shlex.split(converted("*.mlp=fp8", of=dense).text) == [*START, "--quantization", "fp8"]


def test_scheme_of_experts_only_has_its_own_variable_and_kernels() -> None:
    written = converted("*.experts=nvfp4")
    assert shlex.split(written.text) == [
        *START,
        "--quantization",
        "nvfp4_online",
        "--moe-runner-backend",
        "flashinfer_trtllm",
        SEPARATE,
    ]
    (entry,) = written.left_out
    assert (entry.part, entry.instead) == ("scale", "nvfp4")
    assert entry.why.endswith("the better one of two scales for each block, which is not measured")
    second = [
        TensorInfo(name.replace("layers.0", "layers.1"), each.shape, each.dtype)
        for name, each in tree().tensors.items()
        if "experts" in name
    ]
    two = Tree(
        [*tree().tensors.values(), *second],
        {f"{AT}.mlp.experts": "SomeExperts", "model.layers.1.mlp.experts": "SomeExperts"},
    )
    (variable, *_) = shlex.split(converted(f"{AT}.mlp.experts=nvfp4", of=two).text)
    assert variable == "SGLANG_FP4_IGNORED_LAYERS=model.layers.1.mlp.experts"


def test_layers_that_the_checkpoint_fuses_are_named_by_their_parts_too() -> None:
    """SGLang compares `q_proj`, `k_proj` and `v_proj`, even if the checkpoint has `qkv_proj`."""
    shapes = {f"model.layers.{layer}.{name}": (128, 128) for layer in (0, 1) for name in ("qkv_proj", "o_proj")}
    fused = Tree(
        [TensorInfo(f"{name}.weight", shape, "bfloat16") for name, shape in shapes.items()],
        dict.fromkeys(shapes, "Linear"),
    )
    ignored = shlex.split(converted("*.o_proj=fp8", "*.1.qkv_proj=fp8", of=fused).text)[0].partition("=")[2].split(",")
    for part in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        assert any(f".{each}." in f".{AT}.{part}." for each in ignored), part
        assert not any(f".{each}." in f".model.layers.1.{part}." for each in ignored), part


def test_layers_that_sglang_alone_fuses_are_named_as_it_names_them() -> None:
    """SGLang compares `fused_qkv_a_proj_with_mqa` or the names of its parts, which depends on the class of the model."""
    names = (f"{AT}.self_attn.q_a_proj", f"{AT}.self_attn.kv_a_proj_with_mqa", f"{AT}.self_attn.o_proj")
    latent = Tree(
        [TensorInfo(f"{name}.weight", (128, 128), "bfloat16") for name in names], dict.fromkeys(names, "Linear")
    )
    ignored = shlex.split(converted("*.o_proj=fp8", of=latent).text)[0].partition("=")[2].split(",")
    for part in ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa"):
        assert any(f".{each}." in f".{AT}.self_attn.{part}." for each in ignored), part


def test_weight_whose_name_holds_that_of_a_wide_layer_is_left_wide() -> None:
    shapes = {"proj": (128, 128), "layers.0.proj": (128, 128), "layers.0.down": (128, 128)}
    short = Tree(
        [TensorInfo(f"{name}.weight", shape, "bfloat16") for name, shape in shapes.items()],
        dict.fromkeys(shapes, "Linear"),
    )
    written = converted("layers.0=fp8", of=short)
    (entry,) = written.left_out
    assert entry.why == "SGLang leaves it wide with proj, whose name is a part of its name"
    assert entry.tensors == ("layers.0.proj.weight",)
    assert written.text.startswith("SGLANG_FP8_IGNORED_LAYERS=proj python ")


def test_quantized_checkpoint_is_not_quantized_again() -> None:
    packed = TensorInfo("model.layers.0.other.weight", (64, 64), "gptq:int4@g128", uncastable_reason="is quantized")
    written = converted("*.experts=fp8", of=tree(packed))
    assert "--quantization" not in written.text
    assert {entry.why for entry in written.left_out} == {
        "SGLang can't quantize layers of a checkpoint that is quantized already"
    }


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (f"{AT}.self_attn", {"q_proj", "k_proj"}),
        ("v_proj", {"q_proj", "k_proj"}),
        ("self_att", set()),
        ("experts", {"experts"}),
        ("model.layers", {"q_proj", "k_proj", "experts", "gate", "down_proj", "conv"}),
    ],
)
def test_names_are_compared_by_whole_parts(pattern: str, found: set[str]) -> None:
    match = target_named("sglang").match(context("*=bfloat16"), pattern)
    ends = {name.removesuffix(".weight") for name in match.tensors}
    assert {"experts" if ".experts." in name else name.rpartition(".")[2] for name in ends} == found
    assert (match.problem is None) == bool(found)
