"""What every section of the benchmarks shares: a row of the table, and how time and memory are taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


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


def most_anonymous(run: Callable[[], object]) -> int:
    """The most anonymous memory that `run` adds to the process, looked at a thousand times a second; after a warm-up."""
    import threading

    from dtype_engine.runtime.model.live import trim_heap

    def anonymous() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    run()
    trim_heap()
    before = most = anonymous()
    done = threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, anonymous())

    watcher = threading.Thread(target=look)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return most - before
