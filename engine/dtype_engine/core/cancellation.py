"""Cancels and pauses work that calls `cancelled()` between its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dtype_engine.core.callbacks import Fixed

_POLL_S = 0.05

IsCancelled = Callable[[], bool]
"""A function that returns whether the work must stop. It is called often, so it must be quick."""


never = Fixed("never", False)
"""The default for arguments named `cancelled`."""


class CancelToken:
    """Pauses, resumes or stops work from any thread. The work calls the token as its function `cancelled`."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._unpaused = threading.Event()
        self._unpaused.set()

    def __call__(self) -> bool:
        """Return whether the work must stop. Blocks while it is paused."""
        while not self._unpaused.is_set() and not self._cancelled.is_set():
            self._unpaused.wait(_POLL_S)
        return self._cancelled.is_set()

    def pause(self) -> None:
        """Make the work wait at its next step."""
        self._unpaused.clear()

    def resume(self) -> None:
        self._unpaused.set()

    def cancel(self) -> None:
        """Stop the work at its next step, paused or not."""
        self._cancelled.set()
