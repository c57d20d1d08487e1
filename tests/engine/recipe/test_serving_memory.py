"""The largest context that fits a budget, compared with trying every context."""

from __future__ import annotations

import pytest

from dtype_engine.core.kv_cache import KVCache, KVCacheTensor
from dtype_engine.core.tree import TensorInfo, from_tensors
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.recipe.serving_memory import (
    Load,
    cache_bytes,
    default_context,
    largest_context,
    serving_dtype,
    serving_memory,
)
from dtype_engine.results.serving_memory import ServingMemory


@pytest.mark.parametrize("budget", [0, 999, 1000, 1010, 5000, 12345, 10**6, 10**9])
@pytest.mark.parametrize(("of_token", "window"), [(7, 10**9), (7, 50), (0, 1)])
@pytest.mark.parametrize(("linear", "square"), [(0, 0), (3, 0), (3, 2), (0, 1)])
def test_largest_context_within_a_memory_budget_nearly_fills_the_budget(
    budget: int, of_token: int, window: int, linear: int, square: int
) -> None:
    calls: list[int] = []

    def fixed(tokens: int) -> int:
        return 1000 + of_token * min(tokens, window)

    def activations(tokens: int) -> int:
        calls.append(tokens)
        return linear * tokens + square * tokens**2

    found = largest_context(fixed, activations, budget, 4000)
    best = max((n for n in range(4001) if fixed(n) + activations(n) <= budget and n), default=0)
    calls_made = len(calls) - 4001
    assert found <= best
    assert found >= 0.97 * best - 1
    assert calls_made <= 8
    exact = max((n for n in range(4001) if n and fixed(n) <= budget), default=0)
    assert largest_context(fixed, None, budget, 4000) == exact


def test_serving_dtype_is_the_dtype_of_most_weights() -> None:
    tree = from_tensors([TensorInfo("a.weight", (64, 64), "bfloat16"), TensorInfo("norm.weight", (64,), "float32")])

    def dtype(*rules: Rule, named: str | None = None) -> str:
        return serving_dtype(tree.totals(make_plan(tree, Recipe(rules)).dtypes)[""], KVCache(dtype=named))

    assert dtype() == "bfloat16"
    assert dtype(Rule("*", "float16")) == "float16"
    assert dtype(Rule("a", "int8"), named="float16") == "float16"
    assert dtype(Rule("a", "int8")) == "bfloat16"


def test_cache_bytes_are_listed_by_the_dtype_of_each_tensor() -> None:
    tree = from_tensors([])
    tensors = (
        KVCacheTensor("a.kv_cache.k", 0, per_token=6, heads=2),
        KVCacheTensor("b.kv_cache.conv_state", 1, fixed=5),
        KVCacheTensor("b.kv_cache.ssm_state", 1, fixed=700, state_dtype="float32"),
        KVCacheTensor("c.kv_cache.ssm_state", 2, fixed=9),
        KVCacheTensor("d.kv_cache.v", 0, per_token=6, heads=2, runs=3),
    )
    tree.kv_cache = KVCache(tensors)
    expected = {"float32": 2 * 700 * 4, "bfloat16": 2 * (6 * 10 + 5 + 9 + 3 * 6 * 10) * 2}
    assert cache_bytes(tree, {}, "bfloat16", 10, 2) == expected
    per_token = cache_bytes(tree, {"d.kv_cache.v": "fp8@token"}, "bfloat16", 10, 2)["fp8@token"]
    assert per_token == 3 * cache_bytes(tree, {"a.kv_cache.k": "fp8@token"}, "bfloat16", 10, 2)["fp8@token"]


def test_memory_of_states_is_that_of_their_rule_and_a_note_names_the_default() -> None:
    tree = from_tensors([TensorInfo("a.weight", (64, 64), "bfloat16")])
    tree.kv_cache = KVCache(
        (
            KVCacheTensor("a.kv_cache.k", 0, per_token=6, heads=2),
            KVCacheTensor("b.kv_cache.conv_state", 1, fixed=5),
            KVCacheTensor("b.kv_cache.ssm_state", 1, fixed=700, state_dtype="float32"),
        )
    )

    def served(kv: str | None, *rules: str) -> ServingMemory:
        return serving_memory("a", tree, make_plan(tree, Recipe.of(map(Rule.parse, rules))), Load(10, 3, kv))

    assert served(None).kv_bytes == 3 * (60 * 2 + 5 * 2 + 700 * 4)
    assert served("float8_e4m3fn").kv_bytes == 3 * (60 + 5 * 2 + 700 * 4)
    assert served(None, "*.ssm_state=bf16").kv_bytes == 3 * (60 * 2 + 5 * 2 + 700 * 2)
    assert served(None, "*.ssm_state=bf16").notes == ()
    assert (
        served(None)
        .notes[0]
        .startswith("1 recurrent state counted in f32, as transformers keeps them; vLLM and SGLang")
    )
    assert served(None).notes[0].endswith("a rule such as *.ssm_state=bf16 counts that")
    assert served("float8_e4m3fn").kv_bytes_per_token == 6


def test_default_context_is_at_most_the_longest_context_of_the_model() -> None:
    tree = from_tensors([])
    assert default_context(tree) == 8192
    tree.kv_cache = KVCache(longest=77)
    assert default_context(tree) == 77
