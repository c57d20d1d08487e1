"""Cancel and pause for whatever asks `cancelled()` between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOK_EVERY_S = 0.05


IsCancelled = Callable[[], bool]
"""Whether what is under way is to stop. Asked often; must be quick."""


def never() -> bool:
    """The answer of work that nobody can cancel."""
    return False


class CancelToken:
    """Pass it as `cancelled`: while it is closed the work waits where it is, and loses nothing. Safe to use from any thread."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()
        self._open = threading.Event()
        self._open.set()

    def __call__(self) -> bool:
        """Whether to stop; waits while paused."""
        while not self._stop.is_set() and not self._open.wait(_LOOK_EVERY_S):
            pass
        return self._stop.is_set()

    @property
    def paused(self) -> bool:
        """Whether the work waits."""
        return not self._open.is_set()

    def pause(self) -> None:
        """Let the work wait at its next step."""
        self._open.clear()

    def resume(self) -> None:
        """Let it go on."""
        self._open.set()

    def cancel(self) -> None:
        """Stop the work at its next step, paused or not."""
        self._stop.set()
