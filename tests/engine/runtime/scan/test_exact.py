"""The exhaustive scan measures what a recipe of one cast does."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers import architectures

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.results.scan import ScanReport


def session() -> Any:
    module, inputs = architectures.make("llama")
    return de.open(module, inputs=inputs)


def test_each_exact_score_is_the_drift_of_a_single_cast() -> None:
    one, other = session(), session()
    exact = one.scan(["int8"], exact=True).scores()
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    for name in names:
        other.apply(Recipe((Rule(name, "int8"),)))
        assert exact[name, "int8"] == pytest.approx(other.drift().output.kl_mean, rel=1e-9), name
        assert exact[name, "int8"] > 0
    castable = {name for name, tensor in one.tree.tensors.items() if tensor.castable and tensor.persistent}
    assert set(exact) == {(name, dtype) for name in castable for dtype in ("float32", "int8")}


def test_cancelled_exact_scan_restores_the_recipe() -> None:
    one = session()
    one.cast("*", "bfloat16")
    reports: list[ScanReport] = []
    done: list[int] = []
    with pytest.raises(de.Cancelled):
        one.scan(
            ["int8"],
            exact=True,
            on_progress=lambda what, count, total: done.append(count),
            on_estimate=reports.append,
            cancelled=lambda: len(done) == 3,
        )
    assert {weight.dtype for weight in one.model.weights.values() if weight.info.persistent} == {"bfloat16"}
    assert not reports  # the first comes after 64 measurements
