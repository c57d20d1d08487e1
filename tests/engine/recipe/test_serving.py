"""What vLLM and SGLang would do with an export of a plan. The rules for fused layers are held against vLLM's own matching, which is
written down here once more: a fused layer is loaded only where all of its members have one scheme.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.draft_heads import Runtime
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.recipe.serving import RUNTIMES, ServingLint, lint_serving
from dtype_engine.recipe.targets import Context

AT = "model.layers.0"


def tree(hidden: int = 256, heads_out: int = 256) -> Tree:
    shapes = {
        "model.embed_tokens.weight": (512, hidden),
        f"{AT}.input_layernorm.weight": (hidden,),
        **{f"{AT}.self_attn.{name}_proj.weight": (heads_out, hidden) for name in "qkv"},
        f"{AT}.self_attn.o_proj.weight": (hidden, heads_out),
        f"{AT}.mlp.gate.weight": (8, hidden),
        **{f"{AT}.mlp.experts.0.{name}_proj.weight": (512, hidden) for name in ("gate", "up")},
        f"{AT}.mlp.experts.0.down_proj.weight": (hidden, 512),
        "lm_head.weight": (512, hidden),
    }
    classes = {name.removesuffix(".weight"): "Linear" for name in shapes}
    classes |= {"": "MoeForCausalLM", "model.embed_tokens": "Embedding", f"{AT}.input_layernorm": "RMSNorm"}
    return Tree([TensorInfo(name, shape, "bfloat16") for name, shape in shapes.items()], classes)


def read(*rules: str, runtime: Runtime = "vllm", of: Tree | None = None, activations: str = "weights") -> ServingLint:
    made = of or tree()
    plan = make_plan(made, Recipe(tuple(map(Rule.parse, rules))))
    return lint_serving(Context(made, plan, activations=activations), runtime)  # type: ignore[arg-type]


def found(reading: ServingLint) -> list[tuple[str, str]]:
    return [(finding.effect, finding.why) for finding in reading.findings]


def test_lint_finds_nothing_in_a_plan_that_the_runtime_loads() -> None:
    for rules in ("*_proj=nvfp4", "*_proj=int4@g128", "*_proj=fp8@128x128", "*.experts=mxfp4 *.self_attn=mxfp8"):
        reading = read(*rules.split())
        assert reading.findings == ()
        assert reading.loads
        assert reading.quantised == 7


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("rules", ["*_proj=int8", "*_proj=fp8 *.mlp=int4@g32", "*=nvfp4", "*.{q,k}_proj=mxfp4"])
def test_lint_of_a_plan_with_roundings_is_that_of_its_formats(rules: str, runtime: Runtime) -> None:
    for activations in ("none", "weights"):
        plain, rounded = (
            read(*(rule + rounding for rule in rules.split()), runtime=runtime, activations=activations)
            for rounding in ("", ":gptq")
        )
        assert plain == rounded


def test_packed_experts_are_served_as_linear_layers_in_one_format() -> None:
    names = {
        "gate_up_proj": ((2, 512, 128), ("gate_proj", "up_proj")),
        "down_proj": ((2, 128, 256), ("down_proj",)),
    }
    tensors = [
        TensorInfo(
            f"{AT}.mlp.experts.{name}", shape, "bfloat16",
            stored_as=tuple(f"{AT}.mlp.experts.{expert}.{part}.weight" for part in parts for expert in range(2)),
        )
        for name, (shape, parts) in names.items()
    ]  # fmt: skip
    packed = Tree(tensors, {f"{AT}.mlp.experts": "MixtralExperts"})
    assert found(read("*.experts=nvfp4", of=packed)) == []
    assert found(read("*.experts=int4@g128", of=packed)) == []
    assert found(read("*.experts=e5m2", of=packed)) == [("refused", "no checkpoint layout has fp8e5")]
    assert found(read("*.down_proj=nvfp4", of=packed)) == [
        ("refused", "the experts of a layer are in several formats: gate_up_proj bf16, down_proj nvfp4")
    ]
    stored_so = Tree([TensorInfo(tensors[0].name, (2, 512, 128), "bfloat16")], {f"{AT}.mlp.experts": "MixtralExperts"})
    assert found(read("*.experts=nvfp4", of=stored_so)) == [
        ("refused", "only the weights of linear layers are quantized")
    ]


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
def test_fused_weights_in_several_formats_are_refused(runtime: Runtime) -> None:
    reading = read("*.[qk]_proj=nvfp4", runtime=runtime)
    assert found(reading) == [
        ("refused", "fused into one layer, and in several formats: q_proj nvfp4, k_proj nvfp4, v_proj bf16")
    ]
    assert not reading.loads
    assert [name.split(".")[-2] for name in reading.findings[0].tensors] == ["q_proj", "k_proj", "v_proj"]
    assert "compressed_tensors/utils.py" in reading.findings[0].source


def test_format_without_a_checkpoint_layout_is_refused_with_the_reason() -> None:
    reasons = dict.fromkeys(why for _, why in found(read("*=nvfp4")))
    assert list(reasons) == ["only the weights of linear layers are quantized", "routers are not quantized"]
    assert found(read("*.o_proj=mxfp6_e2m3")) == [("refused", "no checkpoint layout has mxfp6e2")]
    assert found(read("*.o_proj=float8_e5m2")) == [("refused", "no checkpoint layout has fp8e5")]
    assert found(read("*.o_proj=nvfp4", of=tree(heads_out=250))) == [
        ("refused", "its rows are not a multiple of 16 values")
    ]


def test_weight_only_int8_per_channel_is_refused_for_serving() -> None:
    (finding,) = read("*.o_proj=int8", activations="none").findings
    assert finding.effect == "refused"
    assert read("*.o_proj=int8").findings == ()
    assert "int8@g128" in finding.why
    assert read("*.o_proj=int8@g128").findings == ()


def test_lint_reports_that_per_tensor_scales_change_values_of_fused_layers() -> None:
    reading = read("*.self_attn=fp8@tensor")
    assert [(finding.effect, len(finding.tensors)) for finding in reading.findings] == [("other values", 3)]
    assert read("*.self_attn=fp8").findings == ()


def test_shapes_that_kernels_reject_are_reported() -> None:
    small = tree(heads_out=192)
    assert [effect for effect, _ in found(read("*.self_attn=fp8@128x128", of=small))] == ["refused"]
    assert "q_proj 192, k_proj 192, v_proj 192" in found(read("*.self_attn=fp8@128x128", of=small))[0][1]
    reading = read("*.self_attn=int4@g32", of=small)
    assert found(reading)[0][0] == "slower"
    assert reading.findings[0].tensors == (f"{AT}.self_attn.o_proj.weight",), "192 inputs; q, k and v have 576 outputs"
    assert reading.loads


def test_fused_layer_with_a_missing_weight_is_served_unquantized() -> None:
    full = tree()
    part = Tree(
        [tensor for name, tensor in full.tensors.items() if ".k_proj" not in name],
        {name: module.class_name or "" for name, module in full.modules.items() if ".k_proj" not in name},
    )
    assert found(read("*.self_attn=nvfp4", of=part)) == [
        ("stays wide", "the model has no k_proj, so the fused layer has no scheme")
    ]


def test_sglang_supports_one_format_and_no_zero_points() -> None:
    mixed = ["*.self_attn=nvfp4", "*.experts=int4@g128"]
    assert read(*mixed).findings == ()
    assert "int4" not in found(read(*mixed, runtime="sglang"))[0][1]
    assert found(read(*mixed, runtime="sglang"))[0][0] == "refused"
    assert read("*.experts=int4@g128a").findings == ()
    assert found(read("*.experts=int4@g128a", runtime="sglang")) == [
        ("refused", "zero points are not supported: int4@g128 has none")
    ]


def test_mxfp4_without_quantized_activations_is_reported_as_served_differently() -> None:
    assert [effect for effect, _ in found(read("*.self_attn=mxfp4", activations="none"))] == ["other values"]
    assert read("*.self_attn=nvfp4", activations="none").findings == (), "served as W4A16, too"


@pytest.mark.slow
def test_lint_command_exits_with_1_if_a_runtime_refuses_the_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text('version: 1\nrules:\n  - {pattern: "*.q_proj", dtype: "nvfp4"}\n')
    arguments = ["recipe", "lint", str(file), "--model", "demo", "--for", "vllm"]
    assert run(cli, "dtype-engine", arguments) == 1
    text = capsys.readouterr().out
    assert "! refused: fused into one layer" in text
    assert "should_ignore_layer" in text
    assert run(cli, "dtype-engine", [*arguments, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["loads"] is False
    assert answer["findings"][0]["effect"] == "refused"
    assert run(cli, "dtype-engine", [*arguments, "--sarif"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert {(each["ruleId"], each["level"]) for each in found["results"]} == {("refused", "error")}
    assert len(found["results"]) == sum(len(each["tensors"]) for each in answer["findings"])
    file.write_text('version: 1\nrules:\n  - {pattern: "*", dtype: "bfloat16"}\n')
    assert run(cli, "dtype-engine", arguments) == 0
    assert "no problem found: 0 weights" in capsys.readouterr().out
