"""Holds events for an app that may be slow, or disconnected for a while."""

from __future__ import annotations

import threading
from collections import deque

from dtype_engine.service import events


def add(waiting: deque[events.Event], event: events.Event) -> None:
    """Add an event to a queue. If its type is in `REPLACEABLE`, such as progress, waiting events of the same type are dropped. A
    `ModulesMeasured` event is merged with a waiting one of the same recipe.
    """
    if isinstance(event, events.REPLACEABLE):
        kept = [old for old in waiting if type(old) is not type(event)]
        if len(kept) < len(waiting):
            waiting.clear()
            waiting.extend(kept)
    elif isinstance(event, events.ModulesMeasured):
        event = _merged(waiting, event)
    waiting.append(event)


def _merged(waiting: deque[events.Event], event: events.ModulesMeasured) -> events.ModulesMeasured:
    for old in waiting:
        if isinstance(old, events.ModulesMeasured) and old.recipe == event.recipe:
            waiting.remove(old)
            newest = {reading.name: reading for reading in (*old.modules, *event.modules)}
            return events.ModulesMeasured(event.recipe, tuple(newest.values()))
    return event


class Outbox:
    """A thread-safe queue of events on their way to the app. A newer event replaces waiting events as in `add`.

    keep: whether an event stays stored after `take` has returned it, until the app acknowledges it. After the app has
    reconnected, `take` returns the stored events again. Events are numbered in the order in which they were first taken.
    """

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self._changed = threading.Condition()
        self._waiting: deque[events.Event] = deque()
        self._left: deque[events.Event] = deque()
        self._acknowledged = 0
        self._open = False

    def put(self, event: events.Event) -> None:
        with self._changed:
            add(self._waiting, event)
            self._changed.notify()

    def take(self) -> events.Event | None:
        """Wait for the next event and remove it. Returns None after `shut` was called."""
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
        """Delete the first `received` events, which have arrived at the app."""
        with self._changed:
            while self._acknowledged < received and self._left:
                self._left.popleft()
                self._acknowledged += 1

    def open(self, received: int = 0) -> None:
        """Let `take` return events. The app has received the first `received` events; later ones are returned again."""
        self.acknowledge(received)
        with self._changed:
            self._waiting.extendleft(reversed(self._left))
            self._left.clear()
            self._open = True

    def shut(self) -> None:
        """Make `take` return None from now on, also in a thread that is waiting in it."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
