"""What a second-order estimate can't see: tokens that a router sends elsewhere, and dtypes that a model's code looks at."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from tests.helpers import architectures
from tests.helpers.rank_correlation import compared
from torch import nn

import dtype_engine as de
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.scan.local_errors import LocalErrors
from dtype_engine.runtime.scan.measured_weights import CastWeightsMode
from dtype_engine.runtime.scan.routing import SwapTopKMode, TopKSample, rerouting_drift
from dtype_engine.runtime.scan.scan import Scan


def test_expected_rerouting_of_tokens_equals_that_of_simulated_errors() -> None:
    """An independent hand: draw the change of each margin and count those that go under zero."""
    chooser = random.Random(0)
    margins = [chooser.uniform(0, 0.2) for _ in range(400)]
    sigma = 0.03
    power = 400 * sigma**2
    key = ("w", "int8")
    sample = TopKSample(0, 2.0, margins, 0.5, {key: power * 4}, {key: power * 4})
    times = 2000
    flips = sum(chooser.gauss(0, 2 * sigma) > margin for margin in margins for _ in range(times)) / times
    (drift, variance) = rerouting_drift([sample])[key]
    assert drift == pytest.approx(2 * flips * 0.5, rel=0.02)
    assert variance == pytest.approx(2 * flips * 0.25, rel=0.02)


def test_drift_by_improbable_rerouting_is_zero_with_a_variance_above_zero() -> None:
    key = ("w", "int8")
    sample = TopKSample(0, 1.0, [0.1, math.inf], 0.5, {key: 0.01}, {key: 0.01})
    drift, variance = rerouting_drift([sample])[key]
    assert drift == 0.0
    assert variance > 0.0


class Routed(nn.Module):
    """Each token goes to one of four experts, whose outputs are far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(3 * torch.randn(4, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        value, index = torch.topk(torch.softmax(self.router(x), -1), 1, dim=-1)
        return {"logits": self.head(x + value * self.experts[index.squeeze(-1)])}


def test_scan_score_of_a_router_includes_rerouted_tokens() -> None:
    torch.manual_seed(0)
    session = de.open(Routed(), inputs=[torch.randn(1, 400, 8) for _ in range(6)])
    kinds = ["float8_e4m3fn", "float8_e5m2", "int8"]
    estimate = Scan(session.model, session.inputs, tuple(kinds))
    scan, exact = estimate.run().scores(), session.scan(kinds, exact=True).scores()
    for kind in kinds:
        assert 0.6 < scan["router.weight", kind] / exact["router.weight", kind] < 1.6
        smooth = sum(one.sums["router.weight", kind] for one in estimate.done.values()) / (6 * 400)
        assert smooth < exact["router.weight", kind] / 5  # what the estimate was without them


def test_top_k_swap_routes_only_selected_tokens_to_the_next_best_expert() -> None:
    torch.manual_seed(0)
    module, x = Routed(), torch.randn(1, 6, 8)
    rows = torch.tensor([False, True, False, False, True, False])
    session = de.open(module, inputs=x)
    with torch.no_grad():
        before = module(x)["logits"]
        with SwapTopKMode(session.model.by_id, torch.device("cpu"), 0, rows):
            after = module(x)["logits"]
        scores = torch.softmax(x @ module.router.weight.T, -1).topk(2, -1)
        other = module.head(x + scores.values[..., 1:] * module.experts[scores.indices[..., 1]])
    torch.testing.assert_close(after, torch.where(rows[None, :, None], other, before))


def test_scan_of_a_mixture_of_experts_agrees_with_exact_scores() -> None:
    module, _ = architectures.make("mixtral")
    ids = torch.randint(3, 64, (4, 1, 144), generator=torch.Generator().manual_seed(0))
    session = de.open(module, inputs=[{"input_ids": each} for each in ids])
    kinds = ["float8_e4m3fn", "float8_e5m2"]
    scan, exact = session.scan(kinds, draws=24), session.scan(kinds, exact=True)
    rank, ratio, _ = compared(scan, exact)
    assert rank >= 0.9
    assert 0.7 <= ratio <= 1.4


def test_scan_of_a_mixture_of_experts_with_clear_routing_is_accurate() -> None:
    module, ids, margin = architectures.decided("mixtral", 4, 64, steps=80)
    assert margin > 0.05
    session = de.open(module, inputs=[{"input_ids": row[None]} for row in ids])
    kinds = ["float8_e5m2", "int8"]
    rank, ratio, count = compared(session.scan(kinds, draws=12), session.scan(kinds, exact=True))
    assert count >= 40
    assert rank >= 0.98
    assert 0.8 <= ratio <= 1.25


def alone(session: de.Session, weight: str, dtype: str) -> float:
    """Return the drift if only this weight is in this dtype."""
    session.apply(de.Recipe((de.Rule(weight, dtype),)))
    kl = session.drift().output.kl_mean
    assert kl is not None
    return kl


def test_scan_measures_a_weight_whose_dtype_the_model_code_reads() -> None:
    """A Llama's rotary cosines are in the dtype of the embedding's output: a third of its drift in bfloat16."""
    module, _ = architectures.make("llama")
    session = de.open(module, inputs=[{"input_ids": architectures.tokens(length)} for length in (9, 12)])
    kinds = ["bfloat16", "float16"]
    scan = session.scan(kinds, draws=4).scores()
    for kind in kinds:
        weight = "model.embed_tokens.weight"
        assert scan[weight, kind] == pytest.approx(alone(session, weight, kind), rel=1e-3)


def test_scan_measures_a_weight_without_gradient_on_a_part_of_many_sequences() -> None:
    module, _ = architectures.make("llama")
    ids = torch.randint(3, 64, (8, 1, 32), generator=torch.Generator().manual_seed(0))
    session = de.open(module, inputs=[{"input_ids": each} for each in ids])
    kinds = ["bfloat16", "float16"]
    estimate = Scan(session.model, session.inputs, tuple(kinds), draws=4)
    scan = estimate.run().scores()
    assert [len(one.measured) for one in estimate.done.values()] == [1, 1, 0, 1, 1, 0, 1, 1]
    for kind in kinds:
        weight = "model.embed_tokens.weight"
        assert scan[weight, kind] == pytest.approx(alone(session, weight, kind), rel=0.2)


def narrowed(session: Any, weight: str) -> CastWeightsMode:
    """Return a mode that runs the reference with this weight in bfloat16."""
    model, cpu = session.model, torch.device("cpu")
    errors = LocalErrors(model.weights, torch.float32, budget=1 << 20)
    return CastWeightsMode(model.by_id, cpu, {weight: "bfloat16"}, errors)


def test_cast_of_a_single_weight_in_a_scan_equals_the_candidate() -> None:
    module, inputs = architectures.make("llama")
    session: Any = de.open(module, inputs=inputs)
    weight = next(name for name in session.tree.tensors if name.endswith("up_proj.weight"))
    with torch.no_grad(), narrowed(session, weight):
        ours = main_output(module(**inputs))[1]
    session.cast(weight, "bfloat16")
    drift = session.drift().output
    assert drift.max_abs > 0
    reference = main_output(_reference("llama", inputs))[1]
    assert float((ours.double() - reference.double()).abs().max()) == pytest.approx(drift.max_abs, rel=1e-6)


def test_operation_with_one_of_two_weights_cast_runs_in_the_wider_dtype() -> None:
    """A LayerNorm whose bias alone is in bfloat16 computes in float32: next to nothing drifts."""
    module, inputs = architectures.make("bert")
    session = de.open(module, inputs=inputs)
    weight = "bert.embeddings.LayerNorm.bias"
    with torch.no_grad(), narrowed(session, weight):
        ours = main_output(module(**inputs))[1]
    assert ours.dtype == torch.float32
    reference = main_output(_reference("bert", inputs))[1]
    assert float((ours - reference).abs().max()) < 1e-5


def _reference(name: str, inputs: Any) -> Any:
    module, _ = architectures.make(name)
    with torch.no_grad():
        return module.eval()(**inputs)
