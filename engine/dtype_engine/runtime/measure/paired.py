"""Compares the values that a metric has for the same examples in the reference run and in the candidate run."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.results.metrics import MetricChange

Aggregate = Callable[[list[Any]], float]
DRAWS = 200
"""The number of resamples of the examples from which the error of a metric that is not a mean is estimated, to about 5 %."""


@dataclass(slots=True)
class Examples:
    """The values that a metric has for single examples, in the order of the examples."""

    values: list[Any] = field(default_factory=list)
    aggregate: Aggregate | None = None
    """Computes the metric from the values of all examples. None if each value is a number, and the metric is their mean."""

    def figure(self, name: str) -> float:
        """Return the metric `name`, aggregated over all examples. Raises UserError if the user's `aggregate` returns no number."""
        if self.aggregate is None:
            return statistics.fmean(self.values)
        value = self.aggregate(list(self.values))
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UserError(
                f"the aggregate of {name} returned {printable(repr(value), 100)}, which is no number"
            ) from None


def compare(name: str, reference: Examples, candidate: Examples) -> MetricChange:
    """Return the metric `name` in the reference run and in the candidate run, with the paired standard error of the difference.

    For a mean over n examples, the error is s / √n, where s is the standard deviation of the examples' differences. For every other
    metric, it is the standard deviation of the difference over `DRAWS` resamples of the examples (Efron's bootstrap), which are the
    same for both runs. Raises UserError if there are no examples, or not equally many in both runs.
    """
    count = len(reference.values)
    if not count or count != len(candidate.values):
        raise UserError(
            f"{name} has {count:,} examples on the reference and {len(candidate.values):,} on the candidate: it must have a value "
            "for every example on both"
        )
    before, after = reference.figure(name), candidate.figure(name)
    pairs = list(zip(reference.values, candidate.values, strict=True))
    changed = sum(not _same(one, other) for one, other in pairs)
    aggregate = candidate.aggregate
    error = None
    if count > 1 and aggregate is None:
        error = _deviation([other - one for one, other in pairs]) / math.sqrt(count)
    elif count > 1 and aggregate is not None:
        draw = random.Random(0)
        drawn = []
        for _ in range(DRAWS):
            picked = draw.choices(range(count), k=count)
            one, other = (aggregate([side.values[at] for at in picked]) for side in (reference, candidate))
            drawn.append(float(other) - float(one))
        error = _deviation(drawn)
    return MetricChange(name, before, after, error, count, changed, resampled=aggregate is not None)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)
