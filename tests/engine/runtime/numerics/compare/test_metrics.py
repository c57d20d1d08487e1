"""Every figure against numpy in float64, written down a second time from its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dtype_engine.results.drift import OutputDrift
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics


def pair(
    positions: int = 150, classes: int = 11, noise: float = 0.05
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(positions, classes, generator=generator) * 3
    candidate = reference + noise * torch.randn(positions, classes, generator=generator)
    labels = torch.randint(0, classes, (positions,), generator=generator)
    labels[-1] = -100
    return reference, candidate, labels


def compare(
    reference: torch.Tensor, candidate: torch.Tensor, labels: torch.Tensor | None = None, distribution: bool = True
) -> OutputDrift:
    comparison = OutputMetrics(-1 if distribution else None, acceptance=True)
    comparison.add(reference, candidate, labels)
    return comparison.result()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_elementwise_figures_equal_those_of_numpy() -> None:
    reference, candidate, _ = pair()
    r, c = reference.double().numpy().ravel(), candidate.double().numpy().ravel()
    found = compare(reference, candidate, distribution=False)
    assert found.mean_abs == pytest.approx(np.abs(c - r).mean(), rel=1e-12)
    assert found.max_abs == np.abs(c - r).max()
    assert found.rel_l2 == pytest.approx(np.linalg.norm(c - r) / np.linalg.norm(r), rel=1e-12)
    assert found.sqnr_db == pytest.approx(20 * math.log10(np.linalg.norm(r) / np.linalg.norm(c - r)), rel=1e-12)
    assert found.cosine == pytest.approx(r @ c / np.linalg.norm(r) / np.linalg.norm(c), rel=1e-12)
    assert (found.elements, found.nonfinite, found.kl_mean) == (r.size, 0, None)


def test_kl_and_top1_figures_equal_those_of_numpy() -> None:
    reference, candidate, labels = pair()
    log_p, log_q = log_softmax(reference.double().numpy()), log_softmax(candidate.double().numpy())
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    found = compare(reference, candidate, labels)
    n = len(kl)
    assert found.positions == n
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-10)
    assert found.kl_mean_se == pytest.approx(kl.std(ddof=1) / math.sqrt(n), rel=1e-10)
    for name, q in {"kl_median": 0.5, "kl_p95": 0.95, "kl_p99": 0.99, "kl_p999": 0.999}.items():
        assert getattr(found, name) == pytest.approx(np.quantile(kl, q), rel=1e-10)
    assert found.kl_max == pytest.approx(kl.max(), rel=1e-10)
    same = (log_p.argmax(-1) == log_q.argmax(-1)).mean()
    assert found.top1_agreement == same
    assert found.top1_agreement_se == pytest.approx(math.sqrt(same * (1 - same) / (n - 1)))
    accepted = np.minimum(np.exp(log_p), np.exp(log_q)).sum(-1)
    assert found.acceptance == pytest.approx(accepted.mean(), rel=1e-13)
    assert found.acceptance_se == pytest.approx(accepted.std(ddof=1) / math.sqrt(n), rel=1e-9)


def test_perplexity_and_next_token_figures_equal_those_of_numpy() -> None:
    reference, candidate, labels = pair()
    rows = np.arange(len(labels) - 1)
    picked = labels.numpy()[:-1]
    log_p = log_softmax(reference.double().numpy())[rows, picked]
    log_q = log_softmax(candidate.double().numpy())[rows, picked]
    found = compare(reference, candidate, labels)
    dp = np.exp(log_q) - np.exp(log_p)
    assert found.scored_tokens == len(rows)
    assert found.dp_mean == pytest.approx(dp.mean(), rel=1e-9)
    assert found.dp_mean_se == pytest.approx(dp.std(ddof=1) / math.sqrt(len(dp)), rel=1e-9)
    assert found.dp_rms == pytest.approx(math.sqrt((dp**2).mean()), rel=1e-9)
    assert found.dp_p1 == pytest.approx(np.quantile(dp, 0.01), rel=1e-9)
    assert found.dp_p99 == pytest.approx(np.quantile(dp, 0.99), rel=1e-9)
    assert found.perplexity_reference == pytest.approx(math.exp(-log_p.mean()), rel=1e-9)
    assert found.perplexity_candidate == pytest.approx(math.exp(-log_q.mean()), rel=1e-9)
    assert found.log_ratio == pytest.approx(math.log(found.perplexity_candidate / found.perplexity_reference), rel=1e-6)
    assert found.log_ratio_se == pytest.approx((log_p - log_q).std(ddof=1) / math.sqrt(len(dp)), rel=1e-9)


def test_figures_of_single_sequences_add_up_to_those_of_all_sequences() -> None:
    reference, candidate, labels = pair()
    whole = compare(reference, candidate, labels)
    comparison = OutputMetrics(-1, acceptance=True)
    for start, end in ((0, 17), (17, 18), (18, 150)):
        comparison.add(reference[None, start:end], candidate[None, start:end], labels[None, start:end])
    parts = comparison.result()
    for name, expected in whole.by_name().items():
        assert getattr(parts, name) == (None if expected is None else pytest.approx(expected, rel=1e-12)), name


def test_identical_outputs_have_no_drift() -> None:
    reference, _, labels = pair()
    found = compare(reference, reference.clone(), labels)
    assert (found.mean_abs, found.max_abs, found.rel_l2, found.kl_mean, found.kl_max) == (0, 0, 0, 0, 0)
    assert (found.sqnr_db, found.cosine, found.top1_agreement, found.log_ratio) == (math.inf, 1, 1, 0)
    assert (found.acceptance, found.acceptance_se) == (1, 0)


@pytest.mark.parametrize("odd", [None, -math.inf, math.inf, math.nan])
def test_shortcut_for_equal_outputs_does_not_change_the_figures(odd: float | None) -> None:
    reference, _, labels = pair()
    if odd is not None:
        reference[3, 2] = odd
    assert repr(compare(reference, reference.clone(), labels)) == repr(compare(reference, reference.double(), labels))


def test_relative_error_to_a_reference_of_zeros_is_infinite() -> None:
    found = compare(torch.zeros(3), torch.ones(3), distribution=False)
    assert (found.mean_abs, found.rel_l2, found.sqnr_db) == (1, math.inf, -math.inf)
    assert math.isnan(found.cosine)


def test_percentiles_of_fewer_than_100_positions_are_none() -> None:
    reference, candidate, labels = pair(99)
    found = compare(reference, candidate, labels)
    assert found.kl_p99 is found.kl_p95 is found.dp_p1 is None
    assert found.kl_median is not None
    one = compare(reference[:1], candidate[:1], labels[:1])
    assert one.kl_mean is not None
    assert one.kl_mean_se is one.top1_agreement_se is one.acceptance_se is None
    assert one.acceptance is not None


def test_logits_that_are_minus_infinity_in_reference_and_candidate_are_left_out() -> None:
    reference, candidate, labels = pair()
    labels[labels == 0] = 1
    reference[:, 0] = candidate[:, 0] = -math.inf
    found = compare(reference, candidate, labels)
    without = compare(reference[:, 1:], candidate[:, 1:], torch.where(labels > 0, labels - 1, labels))
    assert found.nonfinite == 0
    assert found.kl_mean == pytest.approx(without.kl_mean, rel=1e-9)
    assert found.max_abs == without.max_abs


@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.inf])
def test_single_nonfinite_candidate_value_is_counted_and_makes_errors_infinite(bad: float) -> None:
    reference, candidate, _ = pair()
    candidate[3, 4] = bad
    found = compare(reference, candidate, distribution=False)
    assert found.nonfinite == 1
    assert found.max_abs == found.mean_abs == math.inf
    assert found.sqnr_db == -math.inf


def test_outputs_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        compare(torch.zeros(2, 3), torch.zeros(3, 2))


@pytest.mark.parametrize("factor", [0.0, 1e-3, -1.0, 1e3])
def test_cosine_of_a_candidate_of_another_scale_equals_that_of_numpy(factor: float) -> None:
    reference, noise, _ = pair()
    candidate = factor * reference + (0.01 * factor * noise)
    found = compare(reference, candidate, distribution=False)
    r, c = reference.double().numpy().ravel(), candidate.double().numpy().ravel()
    if not factor:
        assert math.isnan(found.cosine)
        return
    assert found.cosine == pytest.approx(r @ c / np.linalg.norm(r) / np.linalg.norm(c), rel=1e-12)


def test_acceptance_is_measured_only_if_asked_for() -> None:
    reference, candidate, labels = pair()
    comparison = OutputMetrics(-1)
    comparison.add(reference, candidate, labels)
    assert comparison.result().acceptance is None
    assert compare(reference, candidate, labels, distribution=False).acceptance is None


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_acceptance_is_nan_if_an_output_has_nan(side: str) -> None:
    reference, candidate, _ = pair()
    (reference if side == "reference" else candidate)[3, 4] = math.nan
    found = compare(reference, candidate).acceptance
    assert found is not None
    assert math.isnan(found)
