"""What every section of the benchmarks shares: a row of the table, and how time is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Row:
    """A measured value, and what it may be at most."""

    what: str
    value: float
    unit: str
    budget: float | None = None
    least: float | None = None

    @property
    def missed(self) -> bool:
        return (self.budget is not None and self.value > self.budget) or (
            self.least is not None and self.value < self.least
        )


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def median_of_ratios(one: Callable[[], object], other: Callable[[], object], pairs: int) -> float:
    """The median of how many times as long `one` takes as `other`, in turns, after a turn to warm up."""
    ratios = []
    for _ in range(pairs + 1):
        plain = seconds(other)
        ratios.append(seconds(one) / plain)
    return statistics.median(ratios[1:])
