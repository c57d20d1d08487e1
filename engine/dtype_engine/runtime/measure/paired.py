"""Compares the values that a metric has for the same examples in the reference run and in the candidate run."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.results.metrics import MetricChange

Aggregate = Callable[[list[Any]], Any]
"""Computes a metric, a number or a tensor with one, from the values of all examples."""
DRAWS = 200
"""The number of resamples of the examples from which the error of a metric that is not a mean is estimated, to about 5 %."""


@dataclass(slots=True)
class Examples:
    """The values that a metric has for single examples, in the order of the examples."""

    values: list[Any] = field(default_factory=list)
    aggregate: Aggregate | None = None
    """Computes the metric from the values of all examples. None if each value is a number, and the metric is their mean."""
    epsilon: float = 2.0**-52
    """As in `MetricChange`."""

    def figure(self, name: str) -> float:
        """Return the metric `name`, aggregated over all examples. Raises UserError if the user's `aggregate` returns no number."""
        if self.aggregate is None:
            return statistics.fmean(self.values)
        value = self.aggregate(list(self.values))
        self.epsilon = max(self.epsilon, epsilon_of(value))
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UserError(
                f"the aggregate of {name} returned {printable(repr(value), 100)}, which is no number"
            ) from None


def epsilon_of(value: Any) -> float:
    """Return the relative spacing (epsilon) of the floats in what a metric returned. It is float32's if the value contains a tensor
    or an array in float32 or a narrower dtype, because Python's floats are then rounded. Otherwise, it is float64's.
    """
    if isinstance(value, (dict, list, tuple)):
        return max(map(epsilon_of, value.values() if isinstance(value, dict) else value), default=2.0**-52)
    dtype = str(getattr(value, "dtype", ""))
    return 2.0**-23 if "float" in dtype and "64" not in dtype else 2.0**-52


def compare(name: str, reference: Examples, candidate: Examples) -> MetricChange:
    """Return the metric `name` in the reference run and in the candidate run, with the paired standard error of the difference.

    For a mean over n examples, the error is s / √n, where s is the standard deviation of the examples' differences. For every other
    metric, it is the standard deviation of the difference over `DRAWS` resamples of the examples (Efron's bootstrap), which are the
    same for both runs. Resamples on which the metric is undefined are left out, and counted. Raises UserError if there are no
    examples, or not equally many in both runs.
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
    error, draws, undefined = None, 0, 0
    if count > 1 and aggregate is None:
        error = _deviation([other - one for one, other in pairs]) / math.sqrt(count)
    elif count > 1 and aggregate is not None:
        drawn = _resampled(reference, candidate, aggregate)
        draws, undefined = DRAWS, DRAWS - len(drawn)
        error = _deviation(drawn) if len(drawn) > 1 else None
    epsilon = max(reference.epsilon, candidate.epsilon)
    return MetricChange(
        name, before, after, error, count, changed, resampled=aggregate is not None, undefined=undefined, draws=draws,
        epsilon=epsilon,
    )  # fmt: skip


def _resampled(reference: Examples, candidate: Examples, aggregate: Aggregate) -> list[float]:
    """Return the differences of a metric over resamples of the examples. Resamples on which the metric is undefined are left out:
    it is not finite, or `aggregate` raises an exception, although it raised none for all examples together. For example, a
    precision where nothing is found divides by zero, and the area under a curve where one class is missing raises ValueError.
    """
    draw, count, drawn = random.Random(0), len(reference.values), []
    for _ in range(DRAWS):
        picked = draw.choices(range(count), k=count)
        with suppress(Exception):
            one, other = (float(aggregate([side.values[at] for at in picked])) for side in (reference, candidate))
            drawn.append(other - one)
    return [each for each in drawn if math.isfinite(each)]


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)
