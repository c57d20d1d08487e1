"""Recurrent states in searches: a budget counts them in the format that the user sets, since a scan has no scores of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_cache import KVCache, KVCacheTensor
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.recipe.minimize import minimize
from dtype_engine.search.constraints import parse_allowed
from dtype_engine.search.pareto import Constraints, make_front

CONTEXT, BATCH = 100, 3
STATES = ("b.{}.mixer.kv_cache.conv_state", "b.{}.mixer.kv_cache.ssm_state")


@pytest.fixture
def tree() -> Tree:
    """Four layers: two of attention and two of Mamba."""
    found = from_tensors(
        [TensorInfo(f"a.{layer}.attn.k_proj.weight", (8, 8), "bfloat16") for layer in range(2)]
        + [TensorInfo(f"b.{layer}.mixer.in_proj.weight", (8, 8), "bfloat16") for layer in range(2)]
    )
    tensors = [
        KVCacheTensor(f"a.{layer}.attn.kv_cache.{part}", layer, per_token=4) for layer in range(2) for part in "kv"
    ]
    for layer in range(2):
        conv, ssm = (name.format(layer) for name in STATES)
        tensors += [
            KVCacheTensor(conv, 2 + layer, fixed=16),
            KVCacheTensor(ssm, 2 + layer, fixed=1000, state_dtype="float32"),
        ]
    found.kv_cache = KVCache(tuple(tensors))
    return found


def _front(tree: Tree, *only: str) -> tuple[int, Mapping[str, str]]:
    """The bytes and the formats of the only recipe of a search that keeps all weights."""
    scores = {(name, "bfloat16"): 0.0 for name in tree.tensors}
    scores |= {(tensor.name, "kv:float8_e4m3fn"): 1.0 for tensor in tree.kv_cache.of_tokens}
    constraints = Constraints(("*.weight",), (), (), tuple(map(parse_allowed, only)), CONTEXT, BATCH, "own")
    front = make_front(tree, scores, constraints)
    solution = front.solution_at(len(front.points) - 1)
    return solution.bytes, {name: form for name, form in solution.dtypes.items() if "kv_cache" in name}


def test_budget_counts_states_in_the_format_that_the_user_sets(tree: Tree) -> None:
    weights, tokens = 4 * 64 * 2, BATCH * 4 * CONTEXT * 4 * 2
    size, formats = _front(tree)
    assert size == weights + tokens + BATCH * 2 * (16 * 2 + 1000 * 4)
    assert {formats[name.format(layer)] for name in STATES for layer in range(2)} == {"stored"}
    size, formats = _front(tree, "*.ssm_state=f16", "*.kv_cache.conv_state=f32")
    assert size == weights + tokens + BATCH * 2 * (16 * 4 + 1000 * 2)
    caches = make_plan(tree, minimize(tree, formats)).caches
    assert caches == {
        name.format(layer): form
        for name, form in zip(STATES, ("float32", "float16"), strict=True)
        for layer in range(2)
    }
    size, _ = _front(tree, "*.0.*.ssm_state=bf16")
    assert size == weights + tokens + BATCH * (2 * 16 * 2 + 1000 * 4 + 1000 * 2)
    assert _front(tree, "*.ssm_state=stored")[0] == _front(tree)[0]


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ("*.ssm_state=bf16,f16", "recurrent states have no scores to choose by, so give one format"),
        ("*.conv_state=f16@stochastic", "convolutions can't be f16@stochastic"),
        ("*.ssm_state=fp8", "recurrent states can't be fp8"),
        ("*.kv_cache.k=int8@token", "kv:int8@token was not scanned"),
    ],
)
def test_formats_that_can_not_be_chosen_are_refused(tree: Tree, only: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        _front(tree, only)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "wanted",
    [
        {"k": "bfloat16", "v": "bfloat16"},
        {"k": "float16", "v": "float16", "ssm_state": "float16", "conv_state": "float16"},
        {"k": "float8_e4m3fn", "ssm_state": "float16@stochastic"},
        {"k": "bfloat16", "v": "bfloat16", "ssm_state": "float32"},
        {"ssm_state": "bfloat16"},
    ],
)
def test_short_recipe_gives_caches_and_states_exactly_their_formats(tree: Tree, wanted: dict[str, str]) -> None:
    """A pattern for keys and values, such as `*.kv_cache=bf16`, would also reach the states."""
    formats = {tensor.name: form for tensor in tree.kv_cache.tensors if (form := wanted.get(tensor.part))}
    assert make_plan(tree, minimize(tree, formats)).caches == formats
    one = {name: form for name, form in formats.items() if ".0." in name}
    assert make_plan(tree, minimize(tree, one)).caches == one


def test_recipe_with_states_alone_is_short(tree: Tree) -> None:
    names = [tensor.name for tensor in tree.kv_cache.states]
    assert minimize(tree, dict.fromkeys(names, "bfloat16")) in (
        Recipe.of([Rule.parse("*.mixer.kv_cache=bf16")]),
        Recipe.of([Rule.parse("b.*.kv_cache=bf16")]),
    )
