"""Estimates how far a mean over the sequences run so far may be from the mean over all sequences.

Positions of one sequence are not independent, so a sequence is one observation (a cluster). For n of N sequences, let y_i be the
mean of sequence i and w_i its weight. Then ȳ = Σ w_i y_i / Σ w_i is a ratio estimate, with the variance between sequences S² = Σ
(w_i/w̄)² (y_i - ȳ)² / (n - 1) (Cochran, Sampling Techniques, 3rd edition, 6.3). The standard error of ȳ, as an estimate of the mean
over all N sequences, is S sqrt((N - n) / (n N)). It is 0 once all sequences have been run.

Two sequences give a poor estimate of S, and one gives none. S² in the formula is therefore a weighted mean of the measured S², with
n - 1 degrees of freedom, and a prior S², with `_PRIOR_FREEDOM` (a scaled inverse chi-squared prior; Gelman et al., Bayesian Data
Analysis, 3rd edition, 2.6). The prior assumes that sequences differ by `_BETWEEN` of their mean. The prior S² also contains the
squared error of the first sequence's own mean, computed by batch means over blocks of `_BLOCK` positions, since neighboring
positions are alike.

A measurement may stop at the first sequence whose error is small enough, which favors errors that are too small by chance. The
error is therefore corrected, so that the mean over all sequences is within two errors in about 95 of 100 cases: first for Student's
t-distribution, with n - 1 + `_PRIOR_FREEDOM` degrees of freedom, then by `log_normal_error`, because drifts of sequences are
positive and skewed. `make benchmarks` prints how often the mean over all sequences is within two of these errors.

The estimate has two limits. First, it assumes that sequences are random samples of one type of text, so they must be run in an
order spread over the text (`plan.running_order`). Second, in a mixture of experts with changed routing, one position in a thousand
may carry most of the KL. Estimates from a few sequences are then often wrong, so no error is given for such a model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

_BETWEEN = 0.3
_PRIOR_FREEDOM = 3
_BLOCK = 16


def relative_error(weights: Sequence[float], means: Sequence[float], total: int, within: float = 0.0) -> float | None:
    """Return the relative standard error of the weighted mean of `means`, as an estimate of the mean over all `total` sequences. It
    is 0.0 if all sequences were run, and None if the mean is 0, or the mean or the error is not finite. weights, means: one number
    for each sequence that was run. within: the standard error of the first sequence's own mean (see `batch_means_error`).
    """
    count, weight = len(means), sum(weights)
    if count >= total:
        return 0.0
    mean = sum(w * y for w, y in zip(weights, means, strict=True)) / weight if weight else 0.0
    if mean == 0 or not math.isfinite(mean):
        return None
    squares = 0.0
    if count > 1:
        squares = sum(_square(w * count / weight * (y - mean)) for w, y in zip(weights, means, strict=True))
    expected = _square(_BETWEEN * mean) + _square(within)
    variance = (_PRIOR_FREEDOM * expected + squares) / (_PRIOR_FREEDOM + count - 1)
    error = math.sqrt(variance * (total - count) / (count * total)) / abs(mean)
    error = log_normal_error(_square(_student_factor(_PRIOR_FREEDOM + count - 1) * error))
    return error if math.isfinite(error) else None


def _square(value: float) -> float:
    """Return a square, infinite if it is too large for a float, where `**` raises OverflowError."""
    return value * value


def log_normal_error(variance: float) -> float:
    """Return the relative standard error of a positive, skewed estimate from its relative variance: half the distance from 1 to the
    upper limit of the log-normal 95 % interval around 1. For a small variance, this is the variance's square root. (Burnham et al.,
    "Design and Analysis Methods for Fish Survival Experiments", 1987, 2.I.1.)
    """
    return math.expm1(2 * math.sqrt(math.log1p(variance))) / 2


def _student_factor(freedom: int) -> float:
    """Return Student's 97.5 % quantile divided by the normal one, for a `freedom` of 3 or more (Abramowitz and Stegun, 26.7.5)."""
    square = statistics.NormalDist().inv_cdf(0.975) ** 2
    return 1 + (square + 1) / (4 * freedom) + (5 * square**2 + 16 * square + 3) / (96 * freedom**2)


def batch_means_error(values: torch.Tensor) -> float:
    """Return the standard error of the mean of correlated values [positions], computed from the means of blocks of positions.
    Returns 0.0 if there are fewer than two blocks.
    """
    blocks = len(values) // _BLOCK
    if blocks < 2:
        return 0.0
    means = torch.stack([block.mean() for block in values.tensor_split(blocks)])
    return float(means.std()) / math.sqrt(blocks)
