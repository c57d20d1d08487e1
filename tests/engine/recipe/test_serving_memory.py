"""The largest context that fits a budget, compared with trying every context."""

from __future__ import annotations

import pytest

from dtype_engine.core.kv_cache import KVCache
from dtype_engine.core.tree import TensorInfo, from_tensors
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.recipe.serving_memory import default_context, largest_context, serving_dtype


@pytest.mark.parametrize("budget", [0, 999, 1000, 1010, 5000, 12345, 10**6, 10**9])
@pytest.mark.parametrize(("of_token", "window"), [(7, 10**9), (7, 50), (0, 1)])
@pytest.mark.parametrize(("linear", "square"), [(0, 0), (3, 0), (3, 2), (0, 1)])
def test_largest_context_nearly_fills_the_budget(
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


def test_default_context_is_at_most_the_longest_context_of_the_model() -> None:
    tree = from_tensors([])
    assert default_context(tree) == 8192
    tree.kv_cache = KVCache(longest=77)
    assert default_context(tree) == 77
