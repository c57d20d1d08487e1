"""What scores say of nodes, layers and recipes, and limits as one types them: without torch, against sums by hand."""

from __future__ import annotations

import math

import pytest

from dtype_engine import UserError
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Recipe, Rule, make_plan, tensor_bytes
from dtype_engine.results.drift import NATS
from dtype_engine.results.scan import ScanReport, WeightScore
from dtype_engine.search.constraints import SearchConstraints
from dtype_engine.search.sensitivity import aggregate_by_node, layer_map, predict, ranking


def tree() -> Tree:
    names = {
        "emb.weight": (8, 4), "layers.0.attn.q.weight": (4, 4), "layers.0.experts.0.w.weight": (4, 2),
        "layers.0.experts.1.w.weight": (4, 2), "layers.1.attn.q.weight": (4, 4), "norm.weight": (4,),
    }  # fmt: skip
    return Tree(
        TensorInfo(name, shape, "float32", aliases=("head.weight",) if name == "emb.weight" else ())
        for name, shape in names.items()
    )


def scanned() -> ScanReport:
    weights = [
        WeightScore(name, dtype, tensor_bytes(tensor, dtype), place * scale)
        for place, (name, tensor) in enumerate(tree().tensors.items(), 1)
        for dtype, scale in (("float32", 0.0), ("bfloat16", 0.25), ("int8", 1.0))
    ]
    return ScanReport("m", "cpu", "float32", "", NATS, False, 4, 1, 1, ("bfloat16", "int8"), 1.0, 1.0, tuple(weights))


def test_score_of_a_module_sums_its_weights_and_counts_ties_once() -> None:
    sums = aggregate_by_node(tree(), scanned().scores(), "int8")
    assert sums[""] == 1 + 2 + 3 + 4 + 5 + 6
    assert sums["emb"] == sums["head"] == sums["head.weight"] == 1
    assert sums["layers.0"] == 2 + 3 + 4
    assert sums["layers.0.experts"] == 3 + 4
    assert sums["layers"] == 2 + 3 + 4 + 5


def test_layer_map_sums_the_scores_of_experts_and_lists_tensors_outside_layers() -> None:
    found = layer_map(tree(), scanned().scores(), "int8")
    assert found.layers == ("layers.0", "layers.1")
    assert found.kinds == ("attn.q", "experts.*.w")
    assert found.cells == {
        ("layers.0", "attn.q"): 2.0,
        ("layers.0", "experts.*.w"): 7.0,
        ("layers.1", "attn.q"): 5.0,
    }
    assert found.rest == (("emb.weight", 1.0), ("norm.weight", 6.0))


def test_weights_are_ranked_by_score_or_score_per_byte() -> None:
    rows = ranking(tree(), scanned(), "int8")
    assert [row.score.score for row in rows] == [6, 5, 4, 3, 2, 1]
    assert len(ranking(tree(), scanned())) == 12  # float32 costs nothing and is not ranked
    per_byte = ranking(tree(), scanned(), "bfloat16", per_byte=True)
    assert [row.per_byte for row in per_byte] == sorted((row.per_byte for row in per_byte), reverse=True)
    first = per_byte[0]
    assert first.saved == 8  # four float32 values in two bytes each
    assert first.per_byte == 1.5 / 8


def test_predicted_drift_sums_scores_of_the_plan_and_refuses_unscanned_dtypes() -> None:
    report = scanned()
    plan = make_plan(tree(), Recipe((Rule("layers.0", "int8"), Rule("*.q", "bfloat16"))))
    found = predict(tree(), plan, report, report.scores())
    assert found.value == pytest.approx(0.5 + 3 + 4 + 1.25)
    assert found.planned_bytes == plan.planned_bytes
    other = make_plan(tree(), Recipe((Rule("norm", "float16"),)))
    with pytest.raises(UserError, match="was not scanned in float16"):
        predict(tree(), other, report, report.scores())


def test_typed_search_limits_are_parsed() -> None:
    limits = SearchConstraints()
    for line in ("keep *norm*", "alike *.{q,k}", "only bf16,int8", "only head=bf16", "budget 50%", "budget 25%"):
        limits = limits.with_line(line, 1000)
    assert limits.constraints.keep == ("*norm*",)
    assert limits.constraints.groups == ("*.{q,k}",)
    assert limits.constraints.dtypes == ("bfloat16", "int8")
    assert limits.constraints.only == (("head", ("bfloat16",)),)
    assert limits.budget == 250
    assert limits.lines.count("budget 25%") == 1
    assert len(limits.lines) == 5
    active = limits.with_line("active 50%", 1000, 300)
    assert (active.budget, active.constraints.by) == (150, "active")
    assert active.lines == (*limits.lines[:-1], "active 50%")
    again = active.with_line("25%", 1000, 300)
    assert (again.budget, again.constraints.by, again.lines) == (250, "bytes", limits.lines)
    with pytest.raises(UserError, match="unknown which weights of this model a token reads"):
        limits.with_line("active 50%", 1000)
    assert limits.with_line("clear", 1000) == SearchConstraints()
    assert [limits.with_line(line, 1000).budget for line in ("45%", "8MiB", " 600 ")] == [450, 8 << 20, 600]


@pytest.mark.parametrize("line", ["", "keep", "clear x", "budget many", "only bf17", "hold *", "only x="])
def test_invalid_search_limit_is_refused(line: str) -> None:
    with pytest.raises(UserError):
        SearchConstraints().with_line(line, 1000)


def test_sum_with_an_infinite_score_is_infinite() -> None:
    scores = scanned().scores() | {("norm.weight", "int8"): math.inf}
    assert aggregate_by_node(tree(), scores, "int8")[""] == math.inf
