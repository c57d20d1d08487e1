"""Cancels and pauses work that calls `cancelled()` between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dtype_engine.core.callbacks import Fixed

_POLL_S = 0.05

IsCancelled = Callable[[], bool]
"""Whether to stop. Called often; must be quick."""


never = Fixed("never", False)
"""The default of `cancelled`: the work runs to its end."""


class CancelToken:
    """Passed as `cancelled`. While it is paused the work waits where it is, and loses nothing. Safe to use from any thread."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._unpaused = threading.Event()
        self._unpaused.set()

    def __call__(self) -> bool:
        """Whether to stop; waits while paused."""
        while not self._unpaused.is_set() and not self._cancelled.is_set():
            self._unpaused.wait(_POLL_S)
        return self._cancelled.is_set()

    @property
    def paused(self) -> bool:
        """Whether the work waits."""
        return not self._unpaused.is_set()

    def pause(self) -> None:
        """Hold the work at its next step."""
        self._unpaused.clear()

    def resume(self) -> None:
        """Let it go on."""
        self._unpaused.set()

    def cancel(self) -> None:
        """Stop the work at its next step, paused or not."""
        self._cancelled.set()
