"""How often progress is reported."""

from __future__ import annotations

import math
import time

INTERVAL_S = 0.1


class Throttle:
    """Limits reports to one in `every` times `INTERVAL_S`. `first`: whether the very first passes, or only one that long after
    creation.
    """

    def __init__(self, first: bool = True, every: float = 1.0) -> None:
        self._every = every
        self._last = -math.inf if first else time.perf_counter()

    def due(self, last: bool = False) -> bool:
        """Whether to report now. `last`: no report follows, so this one passes."""
        now = time.perf_counter()
        if not last and now - self._last < self._every * INTERVAL_S:
            return False
        self._last = now
        return True
