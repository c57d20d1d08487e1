"""Spearman's rank correlation, and how a scan stands to the exhaustive truth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dtype_engine.results.drift import ScanReport

FLOOR = 1e-12
"""Under this, a drift in nats is float32's own rounding in the measurement, not the cast's."""


def ranks(values: Sequence[float]) -> list[float]:
    """Places from the smallest up; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            found[order[place]] = (start + end) / 2
        start = end + 1
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation, from -1 to 1."""
    return statistics.correlation(ranks(first), ranks(second))


def compared(scan: ScanReport, exact: ScanReport, dtype: str | None = None) -> tuple[float, float, int]:
    """Spearman and the median ratio over all weights x dtypes (or in one dtype) above the floor, and how many these are."""
    estimates, truths = scan.scores(), exact.scores()
    keys = [key for key, truth in truths.items() if truth > FLOOR and dtype in (None, key[1])]
    found, true = [estimates[key] for key in keys], [truths[key] for key in keys]
    return spearman(found, true), statistics.median(map(float.__truediv__, found, true)), len(keys)
