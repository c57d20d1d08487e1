"""Limits how often progress is reported."""

from __future__ import annotations

import math
import time

INTERVAL_S = 0.1


class Throttle:
    """Limits progress reports to one in `every` * `INTERVAL_S` seconds. first: whether the first report is due at once."""

    def __init__(self, first: bool = True, every: float = 1.0) -> None:
        self._every = every
        self._last = -math.inf if first else time.perf_counter()

    def due(self, last: bool = False) -> bool:
        """Return whether a report is due now. last: whether this is the final report, which is always due."""
        now = time.perf_counter()
        if not last and now - self._last < self._every * INTERVAL_S:
            return False
        self._last = now
        return True
