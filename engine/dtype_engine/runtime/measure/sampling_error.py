"""How far a figure over the sequences run so far may be from the same figure over all of them.

Positions of one sequence are not independent, so a sequence counts as one observation (a cluster): with n of N sequences run,
y_i the mean of sequence i and w_i its weight, ȳ = Σ w_i y_i / Σ w_i is a ratio estimate, whose variance between sequences is
S² = Σ (w_i/w̄)² (y_i - ȳ)² / (n - 1) (Cochran, Sampling Techniques, 3rd edition, 6.3). The mean of all N lies
S sqrt((N - n) / (n N)) from that of the n, one standard error: nothing is left to differ once all have been run.

Two sequences say little of S, and one says nothing. So S² is the mean of the measured one, with n - 1 degrees of freedom, and of
one that is stated beforehand, with `_PRIOR_FREEDOM`: sequences differ by `_BETWEEN` of their mean (a scaled inverse chi-squared
prior; Gelman et al., Bayesian Data Analysis, 3rd edition, 2.6), and more where the first one's own blocks of `_BLOCK` positions
do: the error of its mean by batch means comes on top, since positions next to each other are alike.

`make benchmarks` prints how often the value over all sequences then lies within two errors. Limits: the sequences are taken for
draws from one kind of text, so they have to be run in an order that is spread over it (`plan.running_order`); the next chapter
alone says little of a book. Where one position in a thousand carries most of the KL, as in a mixture of experts whose router
changes its mind, no estimate from a few sequences holds (half of the first figures did), and none is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_BETWEEN = 0.3
_PRIOR_FREEDOM = 3
_BLOCK = 16


def relative_error(weights: Sequence[float], means: Sequence[float], total: int, within: float = 0.0) -> float | None:
    """One standard error of the weighted mean of what was run, to that of all `total` sequences, over that mean.

    Args:
        weights, means: Of each sequence that was run.
        total: How many sequences there are.
        within: The standard error of the first sequence's own mean (see `batch_means_error`).

    Returns:
        0.0 where all were run. None where the mean is 0 or not finite: then nothing says how far the rest may be from it.
    """
    count, weight = len(means), sum(weights)
    if count >= total:
        return 0.0
    mean = sum(w * y for w, y in zip(weights, means, strict=True)) / weight if weight else 0.0
    if mean == 0 or not math.isfinite(mean):
        return None
    squares = 0.0
    if count > 1:
        squares = sum((w * count / weight * (y - mean)) ** 2 for w, y in zip(weights, means, strict=True))
    expected = (_BETWEEN * mean) ** 2 + within**2
    variance = (_PRIOR_FREEDOM * expected + squares) / (_PRIOR_FREEDOM + count - 1)
    return math.sqrt(variance * (total - count) / (count * total)) / abs(mean)


def batch_means_error(values: torch.Tensor) -> float:
    """The standard error of the mean of correlated values [positions], by the means of blocks of them.

    0.0 where there are not two blocks.
    """
    blocks = len(values) // _BLOCK
    if blocks < 2:
        return 0.0
    means = torch.stack([block.mean() for block in values.tensor_split(blocks)])
    return float(means.std()) / math.sqrt(blocks)
