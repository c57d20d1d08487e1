"""Formats by runtime: what a search for one finds is what that runtime takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.core import dtypes
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.serving import lint_serving
from dtype_engine.recipe.targets import Context
from dtype_engine.search.families import FAMILIES, family_constraints
from dtype_engine.search.pareto import Constraints
from dtype_engine.search.solve import solve


def test_all_names_are_formats() -> None:
    for names in FAMILIES.values():
        assert all(name in dtypes.CASTABLE_DTYPES for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vllm", "sglang"])
def test_a_search_keeps_to_what_the_runtime_takes(family: str, make_llama: Callable[..., Path]) -> None:
    source = make_llama(dtype="bfloat16", hidden_size=128, intermediate_size=200, num_hidden_layers=2)
    session = de.open(str(source), inputs={"input_ids": torch.arange(3, 19)[None]})
    session.scan(FAMILIES[family], draws=2)
    constraints = family_constraints(session.tree, family, Constraints())
    front = session.front(constraints)
    seen = set()
    smallest = front.points[0].bytes
    for share in (0.0, 0.2, 0.5, 0.8):
        budget = smallest + int(share * (session.tree.stored_bytes - smallest))
        found = solve(front, budget, None)
        planned = Recipe(tuple(Rule(name, dtype) for name, dtype in found.dtypes.items()))
        context = Context(session.tree, make_plan(session.tree, planned), "llama")
        reading = lint_serving(context, family, "weights")  # type: ignore[arg-type]
        assert [finding for finding in reading.findings if finding.effect != "slower"] == []
        seen |= set(found.dtypes.values())
    assert seen & set(dtypes.STORAGE_DTYPES)


def test_rows_that_no_block_divides_get_what_has_no_blocks(make_llama: Callable[..., Path]) -> None:
    source = make_llama(dtype="bfloat16", hidden_size=128, intermediate_size=200, num_hidden_layers=1)
    session = de.open(str(source), inputs={"input_ids": torch.arange(3, 19)[None]})
    constraints = family_constraints(session.tree, "vllm", Constraints(only=(("*.q_proj", ("bfloat16",)),)))
    allowed = dict(constraints.only)
    assert allowed["model.layers.0.mlp.down_proj.weight"] == (
        "bfloat16", "float8_e4m3fn", "fp8@128x128", "stored",
    )  # fmt: skip
    assert allowed["model.embed_tokens.weight"] == ("bfloat16", "stored")
    assert constraints.only[-1] == ("*.q_proj", ("bfloat16",)), "the user's own decides"
    assert constraints.groups == ("*.{q_proj,k_proj,v_proj}", "*.{gate_proj,up_proj}")
    assert family_constraints(session.tree, "llama.cpp", Constraints()) == Constraints()
