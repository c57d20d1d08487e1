"""Which programs load an export of a plan: the rules of `recipe lint`, of exports and of searches, asked in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dtype_engine as de
from dtype_engine.core.roundings import ROUNDED_FORMATS, ROUNDINGS
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.recipe.loading import LOADERS, loads_in
from dtype_engine.recipe.targets import Context
from dtype_engine.search.families import FAMILIES
from dtype_engine.search.pareto import Constraints

AT = "model.layers.0"


def tree() -> Tree:
    shapes = {
        f"{AT}.input_layernorm.weight": (256,),
        **{f"{AT}.self_attn.{name}_proj.weight": (256, 256) for name in "qkvo"},
    }
    classes = {name.removesuffix(".weight"): "Linear" for name in shapes}
    classes |= {"": "Model", "model.embed_tokens": "Embedding", f"{AT}.input_layernorm": "RMSNorm"}
    tied = TensorInfo("model.embed_tokens.weight", (512, 256), "bfloat16", aliases=("lm_head.weight",))
    return Tree([tied, *(TensorInfo(name, shape, "bfloat16") for name, shape in shapes.items())], classes)


def words(*rules: str, of_transformers: bool = True) -> list[str]:
    made = tree()
    plan = make_plan(made, Recipe(tuple(map(Rule.parse, rules))))
    return [loading.words_and_reason for loading in loads_in(Context(made, plan), of_transformers)]


def test_programs_that_searches_and_sentences_name_are_the_same() -> None:
    assert list(LOADERS) == list(FAMILIES)


def test_a_plan_without_scales_loads_everywhere() -> None:
    assert words("*=float16") == ["transformers ✓", "vLLM ✓", "SGLang ✓", "llama.cpp ✓", "dtype-engine ✓"]


def test_a_tied_weight_with_scales_loads_in_this_program_alone() -> None:
    transformers_, vllm, sglang, llama_cpp, own = words("*embed_tokens=int8")
    assert transformers_ == "transformers ✗ (a tied weight can't have scales)"
    assert vllm.startswith("vLLM ✗ (")
    assert sglang.startswith("SGLang ✗ (")
    assert llama_cpp == "llama.cpp ✗ (no i8 in GGUF)"
    assert own == "dtype-engine ✓"


def test_fused_weights_of_several_formats_load_in_transformers_but_not_in_runtimes() -> None:
    found = words("*.{q,k}_proj=fp8", "*.v_proj=bfloat16")
    assert found[:2] == ["transformers ≈ (but for the last bits)", "vLLM ✗ (q, k, v differ)"]
    assert found[-1] == "dtype-engine ✓"


def test_other_values_have_a_mark_of_their_own() -> None:
    assert words("*_proj=fp8@tensor")[1] == "vLLM ≈ (one scale for fused weights)"


@pytest.mark.parametrize("name", ROUNDED_FORMATS)
def test_programs_load_a_format_with_any_rounding_as_without(name: str) -> None:
    for rules in (("*_proj={}",), ("*.{{q,k}}_proj={}", "*.o_proj=nvfp4"), ("*embed_tokens={}",)):
        plain, *rounded = (
            words(*(rule.format(dtype) for rule in rules))
            for dtype in (name, *(f"{name}:{each}" for each in ROUNDINGS))
        )
        assert rounded == [plain] * len(ROUNDINGS)


def test_fused_weights_of_one_format_with_several_roundings_load_in_runtimes() -> None:
    mixed = ("*.q_proj=nvfp4", "*.k_proj=nvfp4:gptq", "*.v_proj=nvfp4:imatrix", "*.o_proj=nvfp4")
    assert words(*mixed) == words("*_proj=nvfp4")


def test_a_model_that_is_no_checkpoint_of_transformers_loads_in_this_program_alone() -> None:
    assert words("*_proj=fp8", of_transformers=False) == ["dtype-engine ✓"]


IDS = torch.arange(3, 19)[None]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["transformers", "vllm", "sglang", "own"])
def test_what_a_search_for_a_program_finds_loads_there(family: str, make_llama: Callable[..., Path]) -> None:
    folder = make_llama(hidden_size=128, dtype="bfloat16", intermediate_size=256, num_hidden_layers=2)
    session = de.open(str(folder), options=de.Options(device="cpu"), inputs={"input_ids": IDS})
    session.scan(FAMILIES[family].dtypes, draws=2)
    front = session.front(Constraints(formats=family))
    for index in range(0, len(front.points), 5):
        found = front.solution_at(index)
        plan = make_plan(session.tree, Recipe(tuple(Rule(name, dtype) for name, dtype in found.dtypes.items())))
        (loading,) = (
            each for each in loads_in(Context(session.tree, plan, activations="weights"), True) if each.loader == family
        )
        assert loading.outcome == "same", loading


@pytest.mark.slow
def test_transformers_raises_an_error_exactly_where_the_plan_says_that_it_does_not_load(
    make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_llama(hidden_size=128, tie_word_embeddings=True)
    for name, rule in (("tied", "*embed_tokens=int8"), ("linear", "*_proj=int8"), ("halves", "*.mlp=bfloat16")):
        session = de.open(str(folder), options=de.Options(device="cpu"), inputs={"input_ids": IDS})
        session.cast(*rule.split("="))
        loads = loads_in(Context(session.tree, session.plan), True)[0].outcome == "same"
        session.export(str(tmp_path / name))
        assert loads == (name != "tied")
        assert loads == _loads(tmp_path / name)


def _loads(folder: Path) -> bool:
    loader: Any = transformers.AutoModelForCausalLM
    try:
        loader.from_pretrained(folder)
    except (OSError, ValueError):
        return False
    return True


def test_types_of_llama_cpp_are_loaded_by_llama_cpp_alone() -> None:
    transformers_, vllm, sglang, llama_cpp, own = words("*=q4_k:imatrix", "*.v_proj=q6_k")
    assert llama_cpp == "llama.cpp ✓"
    assert [each.split(" (")[0] for each in (transformers_, vllm, sglang, own)] == [
        "transformers ✗", "vLLM ✗", "SGLang ✗", "dtype-engine ✗",
    ]  # fmt: skip
    assert own == "dtype-engine ✗ (no checkpoint layout has q4_k)"
