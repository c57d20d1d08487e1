from __future__ import annotations

import math
import statistics

import pytest
import scipy.stats
import torch

from dtype_engine.runtime.measure.sampling_error import batch_means_error, relative_error


def test_sampling_error_is_zero_after_all_sequences() -> None:
    assert relative_error([5, 7], [1.0, 3.0], 2) == 0.0


def test_sampling_error_of_zero_or_infinite_drift_is_unknown() -> None:
    assert relative_error([5, 7], [0.0, 0.0], 9) is None
    assert relative_error([5], [math.inf], 9) is None


def test_sampling_error_after_one_sequence_uses_an_assumed_spread() -> None:
    student = scipy.stats.t.ppf(0.975, 3) / scipy.stats.norm.ppf(0.975)
    for within, error in ((0.0, 0.3), (0.8, math.hypot(0.3, 0.8 / 2.0))):
        # Half of a log-normal interval, as of scipy.
        shape = math.sqrt(math.log1p((student * error * math.sqrt(3 / 4)) ** 2))
        upper = scipy.stats.lognorm.ppf(scipy.stats.norm.cdf(2), shape)
        assert relative_error([10], [2.0], 4, within=within) == pytest.approx((upper - 1) / 2, rel=0.08)


def test_sampling_error_of_many_sequences_is_the_standard_error() -> None:
    """With equal weights this is the textbook's finite population: s sqrt((1 - n/N) / n)."""
    values = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    expected = float(values.std()) * math.sqrt((1 - 400 / 1000) / 400) / float(values.mean())
    assert relative_error([3.0] * 400, values.tolist(), 1000) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("spread", "done"), [(0.1, 1), (0.1, 6), (0.3, 1), (0.3, 3), (0.3, 6), (0.3, 12)])
def test_true_drift_lies_within_two_errors(spread: float, done: int) -> None:
    """Each population has 24 sequences of unequal lengths, whose means are log-normal with this spread."""
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for _ in range(400):
        means = torch.exp(spread * torch.randn(24, generator=generator, dtype=torch.float64))
        weights = torch.randint(50, 200, (24,), generator=generator).double()
        whole = float((weights * means).sum() / weights.sum())
        part = float((weights * means)[:done].sum() / weights[:done].sum())
        error = relative_error(weights[:done].tolist(), means[:done].tolist(), 24)
        assert error is not None
        hits += abs(whole - part) <= 2 * error * part
    assert hits / 400 >= 0.94


@pytest.mark.parametrize("spread", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("precision", [0.05, 0.2])
def test_drift_measured_to_a_precision_lies_within_twice_the_precision(spread: float, precision: float) -> None:
    """In 19 of 20 populations of 60 sequences, the drift is within twice the precision of that of all sequences."""
    generator = torch.Generator().manual_seed(3)
    hits = 0
    for _ in range(200):
        means = torch.exp(spread * torch.randn(60, generator=generator, dtype=torch.float64)).tolist()
        done = next(n for n in range(1, 61) if (relative_error([1.0] * n, means[:n], 60) or 0.0) <= precision)
        part, whole = statistics.fmean(means[:done]), statistics.fmean(means)
        hits += abs(part - whole) <= 2 * precision * whole
    assert hits / 200 >= 0.94


def test_sampling_error_accounts_for_correlated_neighbors() -> None:
    """An autoregression x' = r x + e has (1 + r) / (1 - r) times the variance of the mean that independent values would have."""
    generator = torch.Generator().manual_seed(2)
    correlation, count = 0.5, 20_000
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    values = [0.0]
    for step in noise.tolist():
        values.append(correlation * values[-1] + step)
    variance = 1 / (1 - correlation**2)
    expected = math.sqrt(variance * (1 + correlation) / (1 - correlation) / count)
    # Blocks of 16 see most of the correlation, not all.
    assert batch_means_error(torch.tensor(values[1:])) == pytest.approx(expected, rel=0.1)
    assert batch_means_error(torch.ones(20)) == 0.0
