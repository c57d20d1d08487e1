"""A search within a limit on the bytes that a token reads, compared with trying every combination of dtypes."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import architectures
from tests.helpers.mixtures import make_mixture

import dtype_engine as de
from dtype_engine.checkpoint.token_reads import token_reads
from dtype_engine.core.errors import OutOfReach, UserError
from dtype_engine.core.tree import TensorInfo, Tree, from_tensors
from dtype_engine.search.constraints import parse_bandwidth
from dtype_engine.search.pareto import Constraints, make_front

SHAPES = {
    "model.embed_tokens": (40, 6),
    "model.visual.proj": (10, 10),
    "model.layers.0.self_attn.q_proj": (6, 10),
    **{f"model.layers.0.mlp.experts.{expert}.up_proj": (4, 6 + expert) for expert in range(3)},
    "lm_head": (40, 6),
}
CONFIG = {"architectures": ["AForConditionalGeneration"], "num_experts_per_tok": 2}
DTYPES = ("float32", "bfloat16", "int8")
READ = {"model.embed_tokens": Fraction(1, 40), "model.visual.proj": Fraction(0)}


def made() -> Tree:
    tree = from_tensors([TensorInfo(f"{name}.weight", shape, "float32") for name, shape in SHAPES.items()])
    tree.token_reads = token_reads(tree, CONFIG)
    return tree


def active(name: str, dtype: str) -> Fraction:
    """The expected bytes of a weight that a token reads, with a scale of four bytes for each row in int8."""
    rows, columns = SHAPES[name]
    nbytes = rows * columns * {"float32": 4, "bfloat16": 2, "int8": 1}[dtype] + (4 * rows if dtype == "int8" else 0)
    return nbytes * READ.get(name, Fraction(2, 3) if ".experts." in name else Fraction(1))


def every_mix(scores: dict[tuple[str, str], float]) -> list[tuple[int, float]]:
    """(bytes that a token reads, predicted drift) of every combination of dtypes."""
    names = list(SHAPES)
    found = []
    for mix in itertools.product(DTYPES, repeat=len(names)):
        total = sum((active(name, dtype) for name, dtype in zip(names, mix, strict=True)), Fraction(0))
        drift = math.fsum(scores[f"{name}.weight", dtype] for name, dtype in zip(names, mix, strict=True))
        found.append((math.floor(total + Fraction(1, 2)), drift))
    return found


SCORES = st.lists(st.floats(1e-9, 1), min_size=2 * len(SHAPES), max_size=2 * len(SHAPES))


def scores_of(drifts: list[float]) -> dict[tuple[str, str], float]:
    casts = itertools.product(SHAPES, DTYPES[1:])
    scores = {(f"{name}.weight", dtype): drift for (name, dtype), drift in zip(casts, drifts, strict=True)}
    return scores | {(f"{name}.weight", "float32"): 0.0 for name in SHAPES}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(SCORES, st.floats(0, 1))
def test_best_recipe_within_an_active_budget_is_found(drifts: list[float], share: float) -> None:
    tree, scores = made(), scores_of(drifts)
    whole = tree.active_bytes()
    assert whole is not None
    budget = int(share * whole)
    mixes = every_mix(scores)
    best = min((drift for size, drift in mixes if size <= budget), default=None)
    found = make_front(tree, scores, Constraints(by="active")).best_within(budget)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.score == pytest.approx(best, rel=1e-9)
        assert found.active_bytes == tree.active_bytes({**found.dtypes})
        assert (found.active_bytes or 0) <= budget


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(SCORES)
def test_no_combination_of_dtypes_beats_the_front_in_active_bytes(drifts: list[float]) -> None:
    tree, scores = made(), scores_of(drifts)
    mixes, front = every_mix(scores), make_front(tree, scores, Constraints(by="active"))
    for index, point in enumerate(front.points):
        best = min(drift for size, drift in mixes if size <= (point.active_bytes or 0))
        assert point.predicted == pytest.approx(best, rel=1e-6, abs=1e-9)
        solution = front.solution_at(index)
        assert (point.bytes, point.active_bytes) == (solution.bytes, solution.active_bytes)
        assert point.active_bytes == tree.active_bytes({**solution.dtypes})


def test_what_no_token_reads_stays_as_stored_under_an_active_budget() -> None:
    tree = made()
    front = make_front(tree, scores_of([0.5] * 2 * len(SHAPES)), Constraints(by="active"))
    smallest = front.solution_at(0)
    assert smallest.dtypes["model.visual.proj.weight"] == "float32"
    assert smallest.dtypes["lm_head.weight"] == "int8"


def test_active_budget_of_a_model_is_met_by_its_recipe(tmp_path: Path) -> None:
    make_mixture("Mixtral").save_pretrained(tmp_path)
    session = de.open(str(tmp_path), inputs={"input_ids": architectures.tokens()})
    session.scan(["bfloat16", "int8"], draws=1)
    limits = Constraints(by="active", formats="own")
    found = session.search(budget="45%", constraints=limits)
    session.apply(found)
    stored, planned = session.tree.active_bytes(), session.tree.active_bytes(session.plan.dtypes)
    assert stored is not None
    assert planned == found.active_bytes
    assert (planned or 0) <= 0.45 * stored < session.plan.planned_bytes
    with pytest.raises(OutOfReach, match="nothing reads at most 10 bytes for a token: the smallest is"):
        session.search(budget=10, constraints=limits)


def test_active_budget_of_a_model_without_known_reads_is_refused() -> None:
    tree = from_tensors([TensorInfo("a.weight", (4, 4), "float32")])
    with pytest.raises(UserError, match="it is unknown which weights a token reads"):
        make_front(tree, {("a.weight", "bfloat16"): 0.1}, Constraints(by="active"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.35TB/s", 3.35e12), ("864 GB/s", 864e9), ("1GiB/s", 2**30), (" 10 B/s", 10), ("H100-SXM", 3.35e12),
        ("rtx 4090", 1.008e12), ("A100_80GB_SXM", 2.039e12),
    ],
)  # fmt: skip
def test_bandwidth_is_a_number_or_a_device(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["", "fast", "3.35TB", "3.35", "45%/s", "0GB/s", "-1GB/s", "1e400GB/s", "9" * 400 + "GB/s", "h100"]
)
def test_text_that_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="bandwidth"):
        parse_bandwidth(text)
