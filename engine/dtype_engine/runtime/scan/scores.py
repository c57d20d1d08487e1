"""Combines the results of all sequences into a score (the drift of a cast) and its standard error for each weight and dtype.

A score is a ratio estimator over sequences, in nats per position (or relative squared error): Σ sums / Σ normalizers, two fields of
`SequenceScores`.

The relative variance of a score is the larger of two estimates. The first is 2 / samples, the variance of a mean square of Gaussian
numbers. The second is the variance of a ratio over sequences (Cochran, "Sampling Techniques", 1977, chapter 6). Few sequences make
it unreliable, so it is replaced by a weighted mean of the score's own variance and the mean variance of all scores (a scaled
inverse chi-squared prior; Gelman et al., "Bayesian Data Analysis", 3rd edition, 2.6). A mean of squares is skewed: if it happens to
be low, its error would be low, too. The error is therefore half the distance from the score to the upper limit of its log-normal 95
% interval (`log_normal_error`).

A sample (Σ g·Δ)² of gradients g and local errors Δ has a relative standard error of √2, and samples of different dtypes are
independent. Its ratio to Σ g²Δ² shows how strongly an operation's errors are correlated, and is nearly the same in all dtypes of a
weight. Therefore each ratio is shrunk towards the mean ratio of its weight, unless ratios differ between dtypes by more than
sampling explains. This is an empirical-Bayes (James-Stein) estimator, as in Efron and Morris, "Data Analysis Using Stein's
Estimator and its Generalizations" (1975). A ratio's own value has the weight own = a / (a + v), and the mean ratio has the rest.
Here v is the sampling variance, and a is the amount by which the mean variance between dtypes exceeds v. This reduces the sampling
variance of a score to v (own + (1 - own) / dtypes). The variance between sequences stays the same.

`python -m tests.benchmarks.scan errors` prints how often the exact score is within two of these errors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dtype_engine.runtime.measure.sampling_error import log_normal_error
from dtype_engine.runtime.scan.routing import Key, TopKSample, rerouting_drift

Scores = dict[Key, tuple[float, float | None]]
_PRIOR_FREEDOM = 8
"""The weight of the mean variance of all scores, in degrees of freedom."""
_APPROXIMATION = 0.1
"""The relative standard error of a score (an estimated drift) that no number of samples removes, because the estimate is an
approximation. On small models, it is 0.11 in 16 bits, where later operations round once more, and 0.03 in 8 bits.
"""


@dataclass
class SequenceScores:
    """The results of scanning one sequence. The keys of all mappings are (weight, dtype)."""

    normalizer: float
    """The divisor of `sums`: the number of positions, or the sum of the output's squares if it is no distribution."""
    sums: dict[Key, float]
    """The estimated drift of each cast, times `normalizer`: (Σ g·Δ)², averaged over the backward passes."""
    independent: dict[Key, float] = field(default_factory=dict)
    """Σ g²Δ²: equal to `sums` on average if the errors Δ are independent, with a far lower variance."""
    complete: bool = False
    """Whether the backward passes used all vectors of the second-order term, so that `sums` has no sampling error."""
    topk_samples: list[TopKSample] = field(default_factory=list)
    measured: dict[Key, float] = field(default_factory=dict)
    """Drifts that were measured by separate passes, in the unit of `sums`. They replace the estimates in `sums`."""

    def replace(self, key: Key, drift: float) -> None:
        """Replace the estimate for one (weight, dtype) by a measured drift, summed over the sequence's positions."""
        estimates = [self.independent, self.measured]
        for sample in self.topk_samples:
            estimates += [sample.squares, sample.independent]
        for estimate in estimates:
            estimate.pop(key, None)
        self.sums[key] = drift


def combine_scores(
    done: Sequence[SequenceScores],
    wanted: Mapping[str, Sequence[str]],
    num_probes: int,
    free: Callable[[str, str], bool],
) -> Scores:
    """Return (score, standard error) by (weight, dtype), from the finished sequences (`done`). wanted: the dtypes of each weight.
    num_probes: backward passes per sequence. free(weight, dtype): whether the cast rounds nothing; the score is then 0.
    """
    normalizers = [sequence.normalizer for sequence in done]
    normalizer, count = sum(normalizers), len(done)
    scores: Scores = {(name, dtype): (0.0, 0.0) for name, targets in wanted.items() for dtype in targets}
    parts = {key: [sequence.sums.get(key, 0.0) for sequence in done] for key in scores if not free(*key)}
    between = {
        key: _variance_of_ratio(each, normalizers)
        for key, each in parts.items()
        if normalizer and 0 < sum(each) < math.inf
    }
    mean_between = statistics.fmean(between.values()) if between else 0.0

    def error_of(score: float, own: float, sequences: int, least: float = 0.0, more: float = 0.0) -> float:
        """Return the standard error of `score`. own: its variance between the sequences. sequences: their number. least: a lower
        limit of the variance. more: a variance that is added. All variances are relative.
        """
        prior = mean_between * count / sequences
        variance = (_PRIOR_FREEDOM * prior + (sequences - 1) * own) / (_PRIOR_FREEDOM + sequences - 1)
        return score * log_normal_error(max(least, variance) + more)

    incomplete = sum(not sequence.complete for sequence in done)
    drawn = 2.0 / (num_probes * incomplete) if incomplete else 0.0
    shrunk = _shrink_to_mean(done, wanted, drawn) if incomplete else {}
    for key, each in parts.items():
        score = sum(each) / normalizer if normalizer else math.inf
        if not math.isfinite(score):
            scores[key] = math.inf, None
            continue
        replaced = not any(key in sequence.independent for sequence in done)
        multiplier, left = shrunk.get(key, (1.0, 0.0 if replaced else 1.0))
        score *= multiplier
        known = count > 1 or incomplete
        more = _APPROXIMATION**2 - drawn * (1 - left)
        scores[key] = score, error_of(score, between.get(key, 0.0), count, drawn, more) if known else None
    rerouting = rerouting_drift([sample for sequence in done for sample in sequence.topk_samples])
    for key, (drift, variance) in rerouting.items():
        score, error = scores.get(key, (0.0, 0.0))
        if key in scores and math.isfinite(score) and normalizer:
            scores[key] = score + drift / normalizer, math.hypot(error or 0.0, math.sqrt(variance) / normalizer)
    for key in set().union(*(sequence.measured for sequence in done)) & scores.keys():
        those = [sequence for sequence in done if key in sequence.measured]
        drifts, shares = [each.measured[key] for each in those], [each.normalizer for each in those]
        score = sum(drifts) / sum(shares) if sum(shares) else math.inf
        known = len(those) > 1 and math.isfinite(score)
        own = _variance_of_ratio(drifts, shares) if known and score else 0.0
        scores[key] = score, error_of(score, own, len(those)) if known else None
    return scores


def _variance_of_ratio(parts: Sequence[float], shares: Sequence[float]) -> float:
    """Return the relative variance of the ratio Σ parts / Σ shares over sequences, or 0 for one sequence."""
    total, whole, count = sum(parts), sum(shares), len(parts)
    squares = sum((part / total - share / whole) ** 2 for part, share in zip(parts, shares, strict=True))
    return count / (count - 1) * squares if count > 1 else 0.0


def _shrink_to_mean(
    done: Sequence[SequenceScores], wanted: Mapping[str, Sequence[str]], variance: float
) -> dict[Key, tuple[float, float]]:
    """Return two factors for each score that changes: one for the score, and one for its variance.

    A score's factor shrinks the ratio of `sums` to `independent` (see `SequenceScores`), over the sequences `done`, towards the
    mean ratio of its weight. wanted: the dtypes of each weight. variance: the relative variance of the samples.
    """
    groups: list[dict[Key, float]] = []
    for name, targets in wanted.items():
        ratios = {}
        for dtype in targets:
            key = (name, dtype)
            apart = math.fsum(sequence.independent.get(key, 0.0) for sequence in done)
            whole = math.fsum(sequence.sums.get(key, 0.0) for sequence in done)
            if 0 < apart < math.inf and math.isfinite(whole):
                ratios[key] = whole / apart
        if len(ratios) > 1 and any(ratios.values()):
            groups.append(ratios)
    freedom = sum(len(ratios) - 1 for ratios in groups)
    if not freedom:
        return {}
    # The amount by which the relative variance of a weight's ratios exceeds the sampling variance.
    spread = math.fsum((len(ratios) - 1) * _relative_variance(list(ratios.values())) for ratios in groups) / freedom
    beyond = max(0.0, spread - variance)
    own = beyond / (beyond + variance)
    return {
        key: (own + (1 - own) * statistics.fmean(ratios.values()) / ratio, own + (1 - own) / len(ratios))
        for ratios in groups
        for key, ratio in ratios.items()
        if ratio > 0
    }


def _relative_variance(values: Sequence[float]) -> float:
    """Return the variance divided by the squared mean. (`statistics.variance` uses fractions and takes many times as long.)"""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / mean**2
