"""Events on their way to an app that may be slow, or away for a while."""

from __future__ import annotations

import threading
from collections import deque

from dtype_engine.worker import events


class Outbox:
    """A queue of events in which newer ones take the place of older ones that have not left. Safe to use from any thread.

    keep: what left is kept until it is acknowledged, and leaves again after the next `open`. Events are counted in the order in
    which they leave.
    """

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self._changed = threading.Condition()
        self._waiting: deque[events.Event] = deque()
        self._left: deque[events.Event] = deque()
        self._acknowledged = 0
        self._open = False

    def put(self, event: events.Event) -> None:
        """Add an event."""
        with self._changed:
            if isinstance(event, events.REPLACEABLE):
                self._waiting = deque(old for old in self._waiting if type(old) is not type(event))
            elif isinstance(event, events.ModulesMeasured):
                event = self._merged(event)
            self._waiting.append(event)
            self._changed.notify()

    def _merged(self, event: events.ModulesMeasured) -> events.ModulesMeasured:
        for old in self._waiting:
            if isinstance(old, events.ModulesMeasured) and old.recipe == event.recipe:
                self._waiting.remove(old)
                newest = {reading.name: reading for reading in (*old.modules, *event.modules)}
                return events.ModulesMeasured(event.recipe, tuple(newest.values()))
        return event

    def take(self) -> events.Event | None:
        """The next event, as soon as there is one; None once the outbox is shut."""
        with self._changed:
            while self._open and not self._waiting:
                self._changed.wait()
            if not self._open:
                return None
            event = self._waiting.popleft()
            if self._keep:
                self._left.append(event)
            return event

    def acknowledge(self, received: int) -> None:
        """The first `received` events have arrived."""
        with self._changed:
            while self._acknowledged < received and self._left:
                self._left.popleft()
                self._acknowledged += 1

    def open(self, received: int = 0) -> None:
        """Let events leave, those after the first `received` again."""
        self.acknowledge(received)
        with self._changed:
            self._waiting.extendleft(reversed(self._left))
            self._left.clear()
            self._open = True

    def shut(self) -> None:
        """Let no event leave any more; whoever waits for one goes away."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
