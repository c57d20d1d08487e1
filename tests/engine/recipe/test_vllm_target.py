"""What vLLM can't serve of a recipe while it quantizes a checkpoint itself, and the command that it gets."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.recipe.targets import Context, Conversion, target_named

SHAPES = {
    "model.embed_tokens": (96, 128), "lm_head": (96, 128), "model.layers.0.self_attn.q_proj": (128, 128),
    "model.layers.0.self_attn.k_proj": (64, 128), "model.layers.0.mlp.gate": (4, 128),
    "model.layers.0.mlp.shared_expert.down_proj": (128, 80), "model.layers.0.conv": (128, 128),
}  # fmt: skip
"""A model without v_proj, with a router and a layer whose rows have no whole blocks."""
CLASSES = {
    "model.embed_tokens": "Embedding",
    "model.layers.0.conv": "Conv1D",
    "model.layers.0.mlp.experts": "SomeExperts",
}
EXPERTS = "model.layers.0.mlp.experts"


def tree(*more: TensorInfo, turned: bool = False) -> Tree:
    tensors = [TensorInfo(f"{name}.weight", shape, "bfloat16") for name, shape in SHAPES.items()]
    shapes = {"gate_up_proj": (4, 192, 128), "down_proj": (4, 128, 96)}
    for name, (experts, outputs, inputs) in shapes.items():
        shape = (experts, inputs, outputs) if turned else (experts, outputs, inputs)
        tensors.append(TensorInfo(f"{EXPERTS}.{name}", shape, "bfloat16"))
    return Tree([*tensors, *more], {name: CLASSES.get(name, "Linear") for name in (*SHAPES, EXPERTS)})


def converted(*rules: str, of: Tree | None = None) -> Conversion:
    of = of or tree()
    return target_named("vllm").convert(Context(of, make_plan(of, Recipe.of(map(Rule.parse, rules))), "m"))


@pytest.mark.parametrize(
    ("rule", "weights", "why"),
    [
        ("lm_head=fp8", 1, "vLLM leaves output layers wide"),
        ("*.embed_tokens=fp8", 1, "vLLM quantizes Linear only"),
        ("*.conv=fp8", 1, "vLLM quantizes Linear only"),
        ("*.mlp.gate=fp8", 1, "vLLM leaves routers wide"),
        ("*.q_proj=fp8", 1, "vLLM has one scheme for q_proj, k_proj, which it fuses"),
        ("*.{q,k}_proj=int8", 2, "vLLM has int8_per_channel_weight_only for experts only"),
        ("*.{q,k}_proj=nvfp4", 2, "vLLM has nvfp4_per_token for experts only"),
        ("*.{q,k}_proj=int4@g32", 2, "vLLM has no i4@32"),
        ("*.shared_expert=mxfp8", 1, "vLLM needs rows of a multiple of 32 values"),
        ("*.experts.down_proj=fp8", 1, "vLLM has one scheme for all experts of a layer"),
        ("*.experts=fp8e5", 2, "vLLM has no fp8e5"),
        ("*.conv=float32", 1, "vLLM has one dtype for everything it does not quantize, bfloat16 or float16"),
    ],
)
def test_what_vllm_cannot_serve_is_said_in_one_sentence(rule: str, weights: int, why: str) -> None:
    written = converted(rule)
    assert [(entry.why, entry.part, len(entry.tensors)) for entry in written.left_out] == [(why, "dtype", weights)]
    assert {entry.instead for entry in written.left_out} == {"bfloat16"}
    assert written.patterns == ()
    assert "there is nothing to quantize in this plan" in written.notes
    assert written.notes[0] == "vllm serve MODEL --dtype bfloat16"


def test_experts_that_lie_the_other_way_are_left_wide() -> None:
    (entry,) = converted("*.experts=fp8", of=tree(turned=True)).left_out
    assert entry.why == "it is not known in which order vLLM would pack these experts"


def test_patterns_name_the_part_of_a_fused_layer_that_the_model_lacks() -> None:
    ((pattern, scheme),) = converted("*.{q,k}_proj=fp8").patterns
    assert scheme == "fp8_per_channel"
    for part in "qkv":
        assert re.match(pattern.removeprefix("re:"), f"model.layers.0.self_attn.{part}_proj")


def test_blocks_that_span_two_fused_weights_are_said_not_to_be_measured() -> None:
    (entry,) = converted("*.{q,k}_proj=fp8@128x128").left_out
    assert (entry.part, entry.planned, entry.instead) == ("scale", "fp8@128x128", "fp8@128x128")
    assert "vLLM's blocks do not begin with each of the weights that it fuses, which is not measured" in entry.why


def test_command_is_quoted_for_a_shell() -> None:
    written = converted("*.experts=mxfp4")
    words = shlex.split(written.notes[0])
    assert words[:5] == ["vllm", "serve", "MODEL", "--dtype", "bfloat16"]
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert options["--quantization"] == "online"
    assert json.loads(options["--quantization-config"]) == json.loads(written.text)
    assert list(options) == ["--quantization", "--quantization-config"]


def test_checkpoint_that_is_quantized_already_keeps_its_own_scheme() -> None:
    packed = TensorInfo("model.layers.0.other.weight", (64, 64), "gptq:int4@g128", uncastable_reason="is quantized")
    words = shlex.split(converted("*.experts=mxfp4", of=tree(packed)).notes[0])
    assert "--quantization" not in words
    assert "--quantization-config" in words
