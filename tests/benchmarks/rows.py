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


def median_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
