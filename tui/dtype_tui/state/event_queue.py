"""Holds the engine's events until the main screen handles them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from dtype_engine.service.events import Event
from dtype_engine.service.outbox import add


class EventQueue:
    """A thread-safe queue of the engine's events. Of events that replace each other, such as progress, only the newest waits.
    arrived: called when the number of waiting events has grown. It must not wait for the app's thread.
    """

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._changed = threading.Condition()
        self._waiting: deque[Event] = deque()
        self._shut = False

    def put(self, event: Event) -> None:
        """Add an event. Returns at once, because the engine's threads may hold locks that the app's thread needs."""
        with self._changed:
            before = len(self._waiting)
            add(self._waiting, event)
            grown = len(self._waiting) > before
        if grown:
            self._arrived()

    def take(self) -> Event | None:
        """Remove and return the oldest event, or return None if no event waits."""
        with self._changed:
            event = self._waiting.popleft() if self._waiting else None
            if not self._waiting:
                self._changed.notify_all()
            return event

    def wait_until_empty(self) -> None:
        """Wait until the app has taken every event, or until `shut`. The reader of the engine's pipe calls this."""
        with self._changed:
            while self._waiting and not self._shut:
                self._changed.wait()

    def shut(self) -> None:
        """Let `wait_until_empty` return, because the app ends and takes no more events."""
        with self._changed:
            self._shut = True
            self._changed.notify_all()
