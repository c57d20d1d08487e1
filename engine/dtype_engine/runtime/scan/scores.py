"""Combines the results of all sequences into a score and its standard error for each weight and dtype.

A score is a ratio estimator over sequences, Σ sums / Σ normalizers, in nats per position (or relative squared error). Its standard
error is that of a ratio (Cochran, "Sampling Techniques", 1977, chapter 6).

A sample (Σ g·Δ)² of gradients g and local errors Δ has a relative standard error of √2, and samples of different dtypes are
independent. Its ratio to Σ g²Δ² shows how strongly an operation's errors are correlated, and is nearly the same in all dtypes of a
weight. Therefore each ratio is shrunk towards the mean ratio of its weight, unless ratios differ between dtypes by more than
sampling explains. This is an empirical-Bayes (James-Stein) estimator, as in Efron and Morris, "Data Analysis Using Stein's
Estimator and its Generalizations" (1975). A ratio's own value has the weight a / (a + v): v is the sampling variance, and a is the
amount by which the median variance between dtypes exceeds v.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dtype_engine.runtime.scan.routing import Key, TopKSample, rerouting_drift

Scores = dict[Key, tuple[float, float | None]]


@dataclass
class SequenceScores:
    """The results of scanning one sequence. The keys of the mappings are (weight, dtype)."""

    normalizer: float
    """The divisor of the sums: the number of positions, or the energy of the output."""
    sums: dict[Key, float]
    """(Σ g·Δ)², averaged over the probes: gradients g times local errors Δ at the outputs of the weight's operations."""
    independent: dict[Key, float] = field(default_factory=dict)
    """Σ g²Δ², with g and Δ of `sums`. It equals `sums` if the Δ are independent, and varies far less between probes."""
    errors: dict[Key, float] = field(default_factory=dict)
    """The standard errors of `sums` over the probes."""
    complete: bool = False
    """Whether the probes span the output space, so that `sums` are exact."""
    topk_samples: list[TopKSample] = field(default_factory=list)
    measured: dict[Key, float] = field(default_factory=dict)
    """The same quantity as `sums`, measured by separate passes for the few weights whose dtype the model's code reads."""

    def replace(self, key: Key, drift: float) -> None:
        """Replace the estimate of a weight in a dtype by a measured drift, summed over the sequence's positions."""
        estimates = [self.independent, self.errors, self.measured]
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
    """Return each weight's score and standard error in each dtype. done: the results of each sequence. wanted: the dtypes of each
    weight. num_probes: backward passes per sequence. free(weight, dtype): whether the cast rounds nothing; the score is then 0.
    """
    sums = [sequence.sums for sequence in done]
    normalizers = [sequence.normalizer for sequence in done]
    scores: Scores = {
        (name, dtype): (0.0, 0.0) if free(name, dtype) else _score(done, sums, normalizers, (name, dtype))
        for name, targets in wanted.items()
        for dtype in targets
    }
    if not all(sequence.complete for sequence in done):
        _shrink_to_mean(scores, done, wanted, num_probes)
    normalizer = sum(sequence.normalizer for sequence in done)
    rerouting = rerouting_drift([sample for sequence in done for sample in sequence.topk_samples])
    for key, (drift, variance) in rerouting.items():
        score, error = scores.get(key, (0.0, 0.0))
        if key in scores and math.isfinite(score) and normalizer:
            scores[key] = score + drift / normalizer, math.hypot(error or 0.0, math.sqrt(variance) / normalizer)
    for key in set().union(*(sequence.measured for sequence in done)) & scores.keys():
        those = [sequence for sequence in done if key in sequence.measured]
        score, error = _score(
            those, [sequence.measured for sequence in those], [sequence.normalizer for sequence in those], key
        )
        scores[key] = score, error if len(those) > 1 else None
    return scores


def _score(
    done: Sequence[SequenceScores], sums: Sequence[Mapping[Key, float]], normalizers: Sequence[float], key: Key
) -> tuple[float, float | None]:
    """Return the score Σ sums / Σ normalizers of one weight in one dtype over all sequences, and its standard error. done: the
    results of each sequence; `sums` and `normalizers` are fields of them.
    """
    parts = [each.get(key, 0.0) for each in sums]
    normalizer, count = sum(normalizers), len(normalizers)
    score = sum(parts) / normalizer if normalizer else math.inf
    if not math.isfinite(score):
        return math.inf, None
    if count == 1:
        error = done[0].errors.get(key)
        return score, error / normalizer if error is not None and normalizer else None
    spread = sum((part - score * share) ** 2 for part, share in zip(parts, normalizers, strict=True))
    return score, math.sqrt(count / (count - 1) * spread) / normalizer


def _shrink_to_mean(
    scores: Scores, done: Sequence[SequenceScores], wanted: Mapping[str, Sequence[str]], num_probes: int
) -> None:
    """Shrink each ratio of `sums` to `independent` (see `SequenceScores`) towards its weight's mean ratio, and correct `scores` in
    place. wanted: the dtypes of each weight. num_probes: backward passes per sequence.

    All variances are relative. A sum of many products of gradients and errors is nearly Gaussian, so the variance of its mean
    square is 2 / samples.
    """
    variance = 2.0 / (num_probes * sum(not sequence.complete for sequence in done))
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
    # The amount by which the relative variance of a weight's ratios exceeds the sampling variance.
    spreads = [_relative_variance(list(ratios.values())) for ratios in groups]
    beyond = max(0.0, statistics.median(spreads) - variance) if spreads else 0.0
    own = beyond / (beyond + variance)
    for ratios in groups:
        mean = statistics.fmean(ratios.values())
        for key, ratio in ratios.items():
            score, error = scores[key]
            if ratio > 0:
                scores[key] = (
                    score * (own + (1 - own) * mean / ratio),
                    None if error is None else error * math.sqrt(own + (1 - own) / len(ratios)),
                )


def _relative_variance(values: Sequence[float]) -> float:
    """Return the variance divided by the squared mean. (`statistics.variance` uses fractions and takes many times as long.)"""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / mean**2
