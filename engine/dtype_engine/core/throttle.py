"""How often progress is reported."""

from __future__ import annotations

import time

_INTERVAL_S = 0.1


class Throttle:
    """Limits reports to ten a second. `first`: whether the very first one passes, or only what comes 0.1 s after creation."""

    def __init__(self, first: bool = True) -> None:
        self._last = -_INTERVAL_S if first else time.perf_counter()

    def due(self, last: bool = False) -> bool:
        """Whether to report now; if so, the next report waits. `last`: nothing follows, so it always passes."""
        now = time.perf_counter()
        if not last and now - self._last < _INTERVAL_S:
            return False
        self._last = now
        return True
