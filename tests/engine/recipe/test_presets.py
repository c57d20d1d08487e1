from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtype_engine.checkpoint.source import locate
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.recipe import Recipe, Rule, make_plan, require_matches
from dtype_engine.recipe.file import LOST, RecipeFile, read_recipe_file, write_recipe
from dtype_engine.recipe.presets import PRESETS, covering, preset
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.building.describe import describe


def tree_of_a_moe() -> Tree:
    classes = {
        "": "MixtralForCausalLM",
        "model.embed_tokens": "Embedding",
        "model.norm": "MixtralRMSNorm",
        "lm_head": "Linear",
    }
    tensors = [TensorInfo("model.embed_tokens.weight", (8, 4), "float32")]
    for layer in range(12):
        at = f"model.layers.{layer}"
        classes |= {
            f"{at}.self_attn.q_proj": "Linear",
            f"{at}.mlp.gate": "Linear",
            f"{at}.mlp.experts": "MixtralExperts",
        }
        classes |= {f"{at}.norm": "PreNormBlock", f"{at}.norm.inner": "MixtralRMSNorm", f"{at}.norm.fc": "Linear"}
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


def test_all_bf16_preset_needs_no_classes() -> None:
    headers = from_tensors(TensorInfo(tensor.name, tensor.shape, tensor.dtype) for tensor in MOE.tensors.values())
    assert set(planned("all-bf16", headers).values()) == {"bfloat16"}
    with pytest.raises(UserError, match=r"matches module classes.*config\.json.*file\.py:Name --weights"):
        preset("fp16-but-norms").recipe(headers)


def test_norms_preset_finds_leaves_with_norm_in_their_class() -> None:
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


def test_modelopt_preset_keeps_head_and_routers() -> None:
    found = planned("modelopt")
    low = {name for name, dtype in found.items() if dtype == "float8_e4m3fn"}
    assert low == {name for name in MOE.tensors if name.endswith(("q_proj.weight", "fc.weight", "down_proj"))}


def test_norms_and_head_preset_leaves_the_rest_as_stored() -> None:
    half = Tree(
        [TensorInfo(tensor.name, tensor.shape, "float16") for tensor in MOE.tensors.values()],
        {name: module.class_name for name, module in MOE.modules.items() if module.class_name},
    )
    found = planned("norms-head-fp32", half)
    assert {name for name, dtype in found.items() if dtype == "float32"} == {
        name for name in MOE.tensors if name.endswith(("norm.inner.weight", "model.norm.weight", "lm_head.weight"))
    }


def test_islands_preset_matches_no_neighbors() -> None:
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


@pytest.mark.slow
@given(st.sets(st.sampled_from(sorted(name for name in MOE.modules if name))))
def test_module_patterns_match_nothing_else(modules: set[str]) -> None:
    ordered = [name for name in MOE.modules if name in modules]
    wanted = {tensor.name for name in modules for tensor in MOE.below(name)}
    plan = make_plan(MOE, Recipe.of(Rule(pattern, "float16") for pattern in covering(MOE, ordered)))
    assert {name for taken in plan.selections for name in taken.tensors} == wanted


@pytest.mark.slow
def test_islands_preset_on_t5(tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tree = describe(locate(str(tmp_path)), Options(device="cpu")).tree
    recipe = preset("islands-fp32").recipe(tree)
    assert [rule.pattern for rule in recipe.rules] == ["*.wo"]
    assert len(make_plan(tree, recipe).selections[0]) == 4


def test_described_tree_equals_the_loaded_tree(make_llama: Callable[..., Path]) -> None:
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


def test_class_kinds_include_base_classes(make_llama: Callable[..., Path]) -> None:
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
    assert "1.35 MiB  Everything in bfloat16." in capsys.readouterr().out


@pytest.mark.slow
def test_preset_rules_precede_recipe_and_casts(capsys: pytest.CaptureFixture[str]) -> None:
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


SETTINGS = st.builds(
    RunSettings,
    st.sampled_from(dtypes.COMPUTE_DTYPES),
    st.sampled_from([None, "bfloat16", "float16"]),
    st.sampled_from(["given", "model"]),
    st.sampled_from(["none", "weights"]),
    st.sampled_from(["auto", "none", -1, 0, 1, 7]),
)
SPEAKABLE = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
FIGURES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), SPEAKABLE, st.sampled_from(["yes", "1e3", "null"])
)
FIGURE_NAMES = SPEAKABLE.filter(lambda name: name != LOST)
"""A file keeps that name for the values that casts lose."""


@pytest.mark.slow
@given(st.none() | SETTINGS, st.none() | SPEAKABLE, st.dictionaries(FIGURE_NAMES, FIGURES, max_size=4))
def test_recipe_files_keep_settings_and_figures(
    tmp_path_factory: pytest.TempPathFactory, settings: RunSettings | None, model: str | None, measured: dict[str, Any]
) -> None:
    recipe = Recipe((Rule("*.mlp", "bfloat16"), Rule("type:Linear", "float8_e4m3fn@tensor")))
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(write_recipe(recipe, model, settings, measured), encoding="utf-8")
    found = read_recipe_file(path)
    assert (found.recipe, found.model, found.settings) == (recipe, model, settings)
    assert list(found.measured) == list(measured)
    for name, value in measured.items():
        got = found.measured[name]
        assert type(got) is type(value)
        assert got == value or (isinstance(value, float) and math.isnan(value) and math.isnan(got))  # type: ignore[arg-type]


def test_old_recipe_files_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("version: 1\nrules:\n  - {pattern: '*', dtype: half}\n")
    assert read_recipe_file(path) == RecipeFile(Recipe((Rule("*", "float16"),)))


def test_complete_old_recipe_file_round_trips() -> None:
    """saved/recipe.yaml was written before msgspec read such files."""
    path = Path(__file__).parent / "saved" / "recipe.yaml"
    found = read_recipe_file(path)
    assert found == RecipeFile(
        Recipe((Rule("*", "bfloat16"), Rule("type:LayerNorm", "float32"))),
        "org/name",
        RunSettings("bfloat16", "float16", "model"),
        {
            "kl_mean": 0.00125,
            "sqnr_db": math.inf,
            "positions": 64,
            "finite": True,
            "inputs": "6 prompts",
            "perplexity": None,
        },
        (ValueLoss("norm.weight", "float16", 1, 0, 64),),
    )
    said = ["12 tensors", "2 tensors"], {"kl_mean": "nats"}, found.lost
    assert write_recipe(found.recipe, found.model, found.settings, found.measured, *said) == path.read_text()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("model: [1]", "'model' must be a string"),
        ("settings: 3", "settings: expected object, got int"),
        ("settings: {speed: 1}", "unknown setting 'speed'"),
        ("settings: {compute: fp8}", "setting compute: choose one of"),
        ("settings: {compute: foo}", "setting compute: unknown dtype"),
        ("settings: {autocast: float32}", "torch.autocast supports"),
        ("settings: {quantize_activations: all}", "settings: quantize_activations: invalid enum value 'all'"),
        ("settings: {float_inputs: maybe}", "settings: float_inputs: invalid enum value 'maybe'"),
        ("measured: 3", "'measured' must be a mapping"),
        ("measured: {a: [1]}", r"measured: \[...\]: expected bool | int | float | str | null, got array"),
        ("measured: {3: 1}", "measured: expected str"),
        ("measured: {lost: 3}", "measured.lost: expected array, got int"),
        (
            "measured: {lost: [{tensor: a, dtype: f16}]}",
            r"measured.lost: \[0\]: object missing required field overflowed",
        ),
        (
            "measured: {lost: [{tensor: a, dtype: f16, overflowed: -1, vanished: 0, elements: 1}]}",
            r"measured.lost: \[0\].overflowed: expected int >= 0",
        ),
        (
            "measured: {lost: [{tensor: a, dtype: stored, overflowed: 0, vanished: 0, elements: 1}]}",
            "measured.lost: stored is not a dtype",
        ),
        ("notes: 3", "unknown entry 'notes'"),
    ],
)
def test_invalid_recipe_entries_are_named(tmp_path: Path, entry: str, says: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"version: 1\nrules: []\n{entry}\n")
    with pytest.raises(UserError, match=says) as caught:
        read_recipe_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.slow
def test_run_uses_the_settings_of_its_recipe_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(write_recipe(Recipe((Rule("*.mlp", "bfloat16"),)), settings=RunSettings(autocast="bfloat16")))
    assert run(cli, "dtype-engine", ["drift", "--recipe", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == "autocast bfloat16"
    arguments = ["drift", "--recipe", str(file), "--autocast", "f16", "--float-inputs", "model", "--json"]
    assert run(cli, "dtype-engine", arguments) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == "autocast float16, floating inputs follow the model"
