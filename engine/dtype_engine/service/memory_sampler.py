"""Samples the process's memory while the worker is busy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtype_engine.service import events

if TYPE_CHECKING:
    from dtype_engine.runtime.session.session import Session

_INTERVAL_S = 0.25


class MemorySampler:
    """A thread that emits `Memory` events, four a second while `busy` is set, and none until `session` is set."""

    def __init__(self, emit: Callable[[events.Event], None]) -> None:
        self.busy = threading.Event()
        self.thread = threading.Thread(target=self._sample, name="dtype-engine-memory", daemon=True)
        self.session: Session | None = None
        self._emit = emit
        self._closing = threading.Event()
        self._lock = threading.Lock()

    def emit_now(self) -> None:
        """Emit the memory in use now. The lock ensures that the last event is the newest measurement."""
        if (session := self.session) is not None:
            with self._lock:
                self._emit(events.Memory(session.recipe, session.memory()))

    def close(self) -> None:
        self._closing.set()
        self.busy.set()  # wakes the thread

    def _sample(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            self.busy.wait(1.0)
            if self.busy.is_set() and not self._closing.is_set():
                self.emit_now()
