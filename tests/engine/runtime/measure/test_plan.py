"""In which sequences modules are compared, and what is watched in the others."""

from __future__ import annotations

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine import Recipe, Rule
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.measure.drift import DriftMeter
from dtype_engine.runtime.measure.plan import MeasurementPlan, compared_sequences, outline


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([7], {0}),
        ([5] * 6, {0}),
        ([5] * 7, {0, 6}),
        ([5] * 20, {0, 6, 12, 18}),
        ([1, *[500] * 6], {0, 6}),
        ([1, 500, 20, 500], {0, 2}),
    ],
)
def test_modules_are_compared_in_the_first_and_a_sixth_of_the_other_sequences(
    sizes: list[int], expected: set[int]
) -> None:
    assert compared_sequences(range(len(sizes)), sizes) == expected
    turned = [len(sizes) - 1 - number for number in range(len(sizes))]
    assert compared_sequences(turned, sizes[::-1]) == {turned[number] for number in expected}


def test_outline_of_module_calls_has_only_calls_with_large_spans() -> None:
    """The model has an embedding, a body of twelve blocks with five calls each, and a head."""
    finished, spans = ["embed"], [0]
    for block in range(12):
        began = len(finished)
        for part in ("norm", "up", "act", "down"):
            spans.append(len(finished))
            finished.append(f"body.{block}.{part}")
        spans.append(began)
        finished.append(f"body.{block}")
    spans += [1, len(finished) + 1]
    finished += ["body", "head"]
    assert outline(finished, spans) == {"embed", "body", "head", *(f"body.{block}" for block in range(12))}
    assert outline(finished, spans[:-1]) == set(finished)  # of calls whose spans are not known nothing is left out


def test_output_of_a_head_is_kept_only_if_it_is_called_more_than_once() -> None:
    plan = MeasurementPlan([Batch((torch.ones(2),))])
    plan.add_calls(["head", "body", "head"], [0, 1, 2], ["head"])
    assert plan.cached == {"head", "body"}
    plan = MeasurementPlan([Batch((torch.ones(2),))])
    plan.add_calls(["body", "head"], [0, 1], ["head"])
    assert plan.cached == {"body"}
    assert plan.outline == {"head", "body"}


class Counting(nn.Linear):
    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.runs += 1
        return super().forward(x)


def test_sequences_without_module_comparison_reuse_earlier_outputs() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(Counting(8, 8), nn.ReLU(), Counting(8, 8)) for _ in range(20)))
    session = de.open(module, inputs=[{"input": torch.randn(2, 8)} for _ in range(4)])
    session.drift()
    for cast, runs in (("19", 2), ("15", 10)):
        session.apply(Recipe((Rule(cast, "bfloat16"),)))
        Counting.runs = 0
        assert session.drift().seconds.reused
        assert Counting.runs == 4 * runs


def test_main_output_is_not_kept_for_the_next_pass() -> None:
    """Nothing runs after the logits, and they are the largest output of a model with a large vocabulary."""
    inputs = [{"input_ids": architectures.tokens(length)} for length in (8, 9, 10, 11)]
    session = de.open(architectures.make("llama")[0], inputs=inputs)
    session.cast("*.q_proj.weight", "bfloat16")
    meter = DriftMeter(session.model, session.need_inputs())
    meter.measure()
    classes = session.model.module.config.vocab_size  # type: ignore[union-attr]
    for cache, _ in meter._caches.values():
        kept = {call.module: call.versions for call in cache.calls if call.versions}
        assert any("layers" in module for module in kept)
        assert all(tensor.shape[-1] != classes for versions in kept.values() for tensor, _ in versions)
    session.cast("model.layers.1.mlp.down_proj.weight", "float16")
    assert meter.measure().seconds.reused
    fresh = DriftMeter(session.model, session.need_inputs()).measure()
    assert meter.measure().output == fresh.output
