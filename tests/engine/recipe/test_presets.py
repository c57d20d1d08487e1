from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtype_engine.checkpoint.source import locate
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options
from dtype_engine.core.roundings import ROUNDINGS
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.recipe import Recipe, Rule, make_plan, require_matches
from dtype_engine.recipe.presets import PRESETS, covering, preset, preset_names, rounding_words
from dtype_engine.runtime.building.describe import describe


def tree_of_a_moe() -> Tree:
    classes = {"": "MixtralForCausalLM", "model.embed_tokens": "Embedding", "model.norm": "MixtralRMSNorm"}
    classes["lm_head"] = "Linear"
    tensors = [TensorInfo("model.embed_tokens.weight", (8, 4), "float32")]
    for layer in range(12):
        at = f"model.layers.{layer}"
        classes |= dict.fromkeys((f"{at}.self_attn.q_proj", f"{at}.mlp.gate", f"{at}.norm.fc"), "Linear")
        classes |= {f"{at}.mlp.experts": "MixtralExperts", f"{at}.norm": "PreNormBlock"}
        classes[f"{at}.norm.inner"] = "MixtralRMSNorm"
        tensors += [
            TensorInfo(f"{at}.self_attn.q_proj.weight", (4, 4), "float32"),
            TensorInfo(f"{at}.mlp.gate.weight", (2, 4), "float32"),
            TensorInfo(f"{at}.mlp.experts.down_proj", (2, 4, 4), "float32"),
            TensorInfo(f"{at}.norm.inner.weight", (4,), "float32"),
            TensorInfo(f"{at}.norm.fc.weight", (4, 4), "float32"),
        ]
    tensors += [TensorInfo("model.norm.weight", (4,), "float32"), TensorInfo("lm_head.weight", (8, 4), "float32")]
    tree = Tree(tensors, classes)
    for layer in (1, 3):
        tree.modules[f"model.layers.{layer}.mlp.gate"].keep_in_fp32 = "declared by the model (_keep_in_fp32_modules)"
    return tree


MOE = tree_of_a_moe()


def planned(name: str, tree: Tree = MOE) -> dict[str, str]:
    recipe = preset(name).recipe(tree)
    require_matches(tree, recipe)
    return dict(make_plan(tree, recipe).dtypes)


def test_all_bf16_preset_works_without_known_module_classes() -> None:
    headers = from_tensors(TensorInfo(tensor.name, tensor.shape, tensor.dtype) for tensor in MOE.tensors.values())
    assert set(planned("all-bf16", headers).values()) == {"bfloat16"}
    with pytest.raises(UserError, match=r"matches module classes.*config\.json.*file\.py:Name --weights"):
        preset("fp16-but-norms").recipe(headers)


def test_norms_preset_finds_leaf_modules_with_norm_in_their_class_name() -> None:
    found = planned("fp16-but-norms")
    assert {name for name, dtype in found.items() if dtype == "float32"} == {
        name for name in MOE.tensors if name.endswith(("norm.inner.weight", "model.norm.weight"))
    }
    assert set(found.values()) == {"float16", "float32"}


def test_fp8_linears_preset_casts_linears_and_packed_experts() -> None:
    found = planned("fp8-linears")
    low = {name for name, dtype in found.items() if dtype == "float8_e4m3fn"}
    assert low == {
        name for name in MOE.tensors if name.endswith(("q_proj.weight", "gate.weight", "fc.weight", "down_proj"))
    } | {"lm_head.weight"}
    assert {found[name] for name in found.keys() - low} == {"bfloat16"}


def test_modelopt_preset_leaves_head_and_routers_uncast() -> None:
    found = planned("modelopt")
    low = {name for name, dtype in found.items() if dtype == "float8_e4m3fn"}
    assert low == {name for name in MOE.tensors if name.endswith(("q_proj.weight", "fc.weight", "down_proj"))}


def test_norms_head_fp32_preset_leaves_other_weights_as_stored() -> None:
    half = Tree(
        [TensorInfo(tensor.name, tensor.shape, "float16") for tensor in MOE.tensors.values()],
        {name: module.class_name for name, module in MOE.modules.items() if module.class_name},
    )
    found = planned("norms-head-fp32", half)
    assert {name for name, dtype in found.items() if dtype == "float32"} == {
        name for name in MOE.tensors if name.endswith(("norm.inner.weight", "model.norm.weight", "lm_head.weight"))
    }


def test_islands_preset_casts_only_modules_that_the_model_declares_as_float32() -> None:
    recipe = preset("islands-fp32").recipe(MOE)
    assert {name for taken in make_plan(MOE, recipe).selections for name in taken.tensors} == {
        "model.layers.1.mlp.gate.weight", "model.layers.3.mlp.gate.weight"
    }  # fmt: skip
    bare = Tree(MOE.tensors.values(), {"": "Net"})
    with pytest.raises(UserError, match="declares no islands"):
        preset("islands-fp32").recipe(bare)


def test_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean all-bf16"):
        preset("all-bf61")


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_preset_with_a_format_that_takes_a_rounding_has_it(rounding: str) -> None:
    rounded = [name for name, each in PRESETS.items() if each.rounded(rounding)]
    by_format = ["fp8-linears", "modelopt", "nvfp4", "mxfp4-experts", "w4a16"]
    assert rounded == [*by_format, *(["Q5_K_M", "Q4_K_M", "Q3_K_M"] if rounding == "imatrix" else [])]
    for name in by_format:
        plain, found = planned(name), planned(f"{name}:{rounding}")
        assert {tensor: dtypes.unrounded(dtype) for tensor, dtype in found.items()} == plain
        takes = {tensor for tensor, dtype in plain.items() if dtypes.rounded(dtype, rounding)}
        assert {tensor for tensor, dtype in found.items() if dtypes.BY_NAME[dtype].rounding == rounding} == takes
        assert takes
        assert f"rounded by {rounding}." in preset(f"{name}:{rounding}").sentence
        assert f"{name}:{rounding}" in preset_names()
        assert name in rounding_words()
    assert "mxfp8" in planned(f"mxfp4-experts:{rounding}").values(), "mxfp8 does not take it"


def test_refusal_of_a_preset_with_a_rounding_says_which_have_it() -> None:
    with pytest.raises(
        UserError, match="'all-bf16' has no format that takes the rounding :gptq: it is for fp8-linears, modelopt,"
    ):
        preset("all-bf16:gptq")
    with pytest.raises(UserError, match=r"unknown preset 'w4a16:gtpq': did you mean w4a16:gptq\?"):
        preset("w4a16:gtpq")
    with pytest.raises(UserError, match="unknown preset"):
        preset("w4a16:gptq:gptq")


@pytest.mark.slow
@given(st.sets(st.sampled_from(sorted(name for name in MOE.modules if name))))
def test_patterns_made_for_a_set_of_modules_match_no_other_module(modules: set[str]) -> None:
    ordered = [name for name in MOE.modules if name in modules]
    wanted = {tensor.name for name in modules for tensor in MOE.below(name)}
    plan = make_plan(MOE, Recipe.of(Rule(pattern, "float16") for pattern in covering(MOE, ordered)))
    assert {name for taken in plan.selections for name in taken.tensors} == wanted


@pytest.mark.slow
def test_islands_preset_keeps_wo_of_t5_in_float32(tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tree = describe(locate(str(tmp_path)), Options(device="cpu")).tree
    recipe = preset("islands-fp32").recipe(tree)
    assert [rule.pattern for rule in recipe.rules] == ["*.wo"]
    assert len(make_plan(tree, recipe).selections[0]) == 4


def test_tree_described_from_the_config_equals_the_tree_of_the_loaded_model(make_llama: Callable[..., Path]) -> None:
    from dtype_engine.runtime.building.load import load

    for folder in (
        make_llama(dtype="bfloat16"),
        make_llama("mixed", "bfloat16", {"norm": "float32", "q_proj": "float16"}, tie_word_embeddings=False),
    ):
        source = locate(str(folder))
        found, live = describe(source, Options(device="cpu")), load(source, Options(device="cpu"))
        assert found.tree.tensors == live.tree.tensors
        assert {name: node.class_name for name, node in found.tree.modules.items()} == {
            name: node.class_name for name, node in live.tree.modules.items()
        }
        assert found.model_type == "llama"


def test_classes_known_for_a_module_include_its_base_classes(make_llama: Callable[..., Path]) -> None:
    kinds = describe(locate(str(make_llama())), Options(device="cpu")).kinds
    assert "PreTrainedModel" in kinds["LlamaForCausalLM"]
    assert kinds["Linear"] == frozenset()


@pytest.mark.slow
def test_presets_are_listed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", ["recipe", "presets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in found["presets"]] == list(PRESETS)
    by_name = {entry["name"]: entry for entry in found["presets"]}
    assert by_name["all-bf16"]["planned_bytes"] == found["stored_bytes"] // 2
    assert "declares no islands" in by_name["islands-fp32"]["unavailable"]
    assert run(cli, "dtype-engine", ["recipe", "presets"]) == 0
    said = capsys.readouterr().out
    assert "1.35 MiB  Everything in bfloat16." in said
    assert said.splitlines()[-1] == rounding_words()
    assert by_name["w4a16"]["roundings"] == list(ROUNDINGS)
    assert by_name["all-bf16"]["roundings"] == []


@pytest.mark.slow
def test_preset_rules_come_before_rules_of_cast_options(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "fp8-linears", "--cast", "*.mlp=f16", "--json"]
    assert run(cli, "dtype-engine", ["inspect", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rules"] == ["*=bfloat16", "type:Linear=float8_e4m3fn", "*.mlp=float16"]
    assert set(found["dtypes"]) == {"bfloat16", "float8_e4m3fn", "float16"}
    assert run(cli, "dtype-engine", ["drift", *arguments]) == 0
    drifted = json.loads(capsys.readouterr().out)
    assert drifted["rules"] == found["rules"]
    assert drifted["output"]["max_abs"] > 0
    assert run(cli, "dtype-engine", ["drift", "--preset", "no-such"]) == 2
    assert "unknown preset" in capsys.readouterr().err
