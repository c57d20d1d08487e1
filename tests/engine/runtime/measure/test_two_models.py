"""Drift of one model from another of the same architecture, against both run by plain torch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.helpers import architectures
from torch import nn

import dtype_engine as de
from dtype_engine.runtime.measure.drift import DriftMeter


def logits(module: nn.Module, inputs: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([module(**given).logits[0] for given in inputs]).double()


def tuned(module: nn.Module) -> nn.Module:
    """The same model after some training, so to speak: other values in every weight."""
    other = copy.deepcopy(module)
    draw = torch.Generator().manual_seed(7)
    for parameter in other.parameters():
        parameter.data += 0.02 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=draw)
    return other


@pytest.mark.parametrize("dtype", ["", "bfloat16", "float16"])
def test_the_drift_of_a_model_from_another(dtype: str) -> None:
    inputs = [{"input_ids": architectures.tokens(length)} for length in (9, 12, 10)]
    first = architectures.make("llama")[0]
    second = tuned(first)
    reference, candidate = de.open(copy.deepcopy(first), inputs=inputs), de.open(copy.deepcopy(second), inputs=inputs)
    meter = DriftMeter(reference.model, reference.need_inputs(), candidate=candidate.model)
    meter.measure()
    if dtype:
        candidate.cast("*", dtype)
        for parameter in second.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    totals = meter.measure()  # what is kept of the reference is compared with, and nothing of the candidate is reused
    r, c = logits(first, inputs), logits(second, inputs)
    kl = nn.functional.kl_div(c.log_softmax(-1), r.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    assert totals.output.sqnr_db == pytest.approx(float(20 * torch.log10(r.norm() / (c - r).norm())), abs=1e-6)
    assert totals.output.kl_mean == pytest.approx(float(kl.mean()), rel=1e-6)
    drifting = [each.name for each in totals.modules if each.sqnr_db != math.inf]
    assert "model.layers.0.self_attn.q_proj" in drifting
    assert "model.embed_tokens" in drifting
    assert not totals.seconds.reused
    # The reference's weights are as they were, and its own drift is none.
    assert DriftMeter(reference.model, reference.need_inputs()).measure().output.max_abs == 0
    for part in (*reference.model.module.modules(), *candidate.model.module.modules()):
        assert "_compiled_call_impl" not in vars(part)


def test_models_whose_outputs_differ_in_shape_are_refused() -> None:
    inputs = (torch.randn(4, 8),)
    reference, candidate = (de.open(nn.Linear(8, width), inputs=inputs) for width in (5, 6))
    meter = DriftMeter(reference.model, reference.need_inputs(), candidate=candidate.model)
    with pytest.raises(de.NoForward, match=r"the candidate's output \(output, \(4, 6\)\) is not the reference's"):
        meter.measure()
