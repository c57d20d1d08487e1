"""A worker with every event it emits, and a way to wait for one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dtype_engine import Options, Recipe
from dtype_engine.checkpoint.source import Source, locate
from dtype_engine.worker import events
from dtype_engine.worker.connection import EngineCommand
from dtype_engine.worker.process import EngineProcess
from dtype_engine.worker.worker import Worker

E = TypeVar("E", bound=events.Event)


class Recorder:
    """Every event so far. `on_event` is called for every event on the thread that emits it, as soon as it is recorded."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []
        self.on_event: Callable[[events.Event], None] = lambda event: None
        self._arrived = threading.Condition()

    def _record(self, event: events.Event) -> None:
        with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()
        self.on_event(event)

    def of(self, kind: type[E], since: int = 0) -> list[E]:
        """The events of one kind so far, from index `since` on."""
        return [event for event in self.events[since:] if isinstance(event, kind)]

    def wait_for(
        self, kind: type[E], matches: Callable[[E], bool] = lambda event: True, since: int = 0, seconds: float = 120
    ) -> E:
        """The first such event from index `since` on."""
        deadline = time.monotonic() + seconds
        with self._arrived:
            while True:
                for event in self.events[since:]:
                    if isinstance(event, kind) and matches(event):
                        return event
                since = len(self.events)
                if not self._arrived.wait(deadline - time.monotonic()):
                    kinds = [type(event).__name__ for event in self.events if not isinstance(event, events.Memory)]
                    raise AssertionError(f"no {kind.__name__} that matches; there were {kinds}")

    def measured(self, recipe: Recipe, since: int = 0) -> events.Measured:
        """The first measurement of this recipe from index `since` on."""
        return self.wait_for(events.Measured, lambda event: event.recipe == recipe, since)


class RecordedWorker(Recorder):
    """A worker in this process."""

    def __init__(self, source: Source, options: Options, read_headers: bool = False) -> None:
        super().__init__()
        self.worker = Worker(source, options, self._record, read_headers)


class RecordedProcess(Recorder):
    """An engine in a process of its own."""

    def __init__(self, command: EngineCommand, model: str | None, options: Options) -> None:
        super().__init__()
        self.worker = EngineProcess(command, model, options, self._record)

    @property
    def child(self) -> int:
        """The number of its process."""
        number = self.worker.process_id
        assert number is not None
        return number


@contextmanager
def recorded_worker(
    source: Source | None = None, options: Options | None = None, read_headers: bool = False
) -> Iterator[RecordedWorker]:
    """A started worker, on the demo where no source is given; closed in the end."""
    recorded = RecordedWorker(source or locate(None), options or Options(), read_headers)
    recorded.worker.start()
    try:
        yield recorded
    finally:
        recorded.worker.close()
