"""An engine, in a thread or in a process of its own, with every event it emits, and a way to wait for one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar, cast, get_args

from tests.helpers import draw_times, preloaded

from dtype_engine import Options, Recipe
from dtype_engine.checkpoint.source import locate
from dtype_engine.service import events
from dtype_engine.service.connection import EngineCommand
from dtype_engine.service.control import Open
from dtype_engine.service.engine import Engine
from dtype_engine.service.jobs import Job, Result
from dtype_engine.service.process import EngineProcess
from dtype_engine.service.worker import Worker

E = TypeVar("E", bound=events.Event)


def wait_until(condition: Callable[[], object], seconds: float = 60, otherwise: str = "") -> None:
    """Wait until the condition holds. otherwise: what to say if it never does."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, otherwise
        time.sleep(0.01)


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
        self, kind: type[E], matches: Callable[[E], bool] = lambda event: True, since: int = 0, seconds: float = 300
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

    def answer(self, job: Job[Any, Any, Result], since: int = 0) -> Result:
        """The first result of a job from index `since` on."""
        event = self.wait_for(events.JobDone, lambda done: done.ask.job == job.name, since)
        return cast("Result", event.result)

    def answers(self, job: Job[Any, Any, Result]) -> list[Result]:
        """The results of a job so far."""
        return [result for event in self.events if (result := events.result_of(event, job)) is not None]

    def measured(self, recipe: Recipe, since: int = 0) -> events.Measured:
        """The first measurement of this recipe from index `since` on."""
        return self.wait_for(events.Measured, lambda event: event.recipe == recipe, since)


Way = Literal["thread", "process"]
"""Where an engine runs."""
WAYS: tuple[Way, ...] = get_args(Way)


def make_engine(
    way: Way, model: str | None, options: Options, emit: Callable[[events.Event], None], read_headers: bool = False
) -> Engine:
    """An engine of `model` that runs this way; a process of its own need not import torch. Its events come as far apart as the test
    run says (`draw_times`).
    """
    emit = draw_times.apart(emit)
    if way == "thread":
        return Worker(locate(model, options.trust_pickle), options, emit, read_headers)
    command = EngineCommand(preloaded.command(preloaded.ENGINE))
    return EngineProcess(command, Open(model, options, read_headers), emit)


class RecordedEngine(Recorder):
    """An engine that runs this way; on the demo where no model is given."""

    def __init__(
        self, way: Way, model: str | None = None, options: Options | None = None, read_headers: bool = False
    ) -> None:
        super().__init__()
        self.way = way
        self.worker = make_engine(way, model, options or Options(), self._record, read_headers)

    def __enter__(self) -> Self:
        self.worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()


class RecordedWorker(RecordedEngine):
    """A worker in this process."""

    worker: Worker

    def __init__(self, model: str | None = None, options: Options | None = None, read_headers: bool = False) -> None:
        super().__init__("thread", model, options, read_headers)


class RecordedProcess(Recorder):
    """An engine in a process of its own, as the app starts it."""

    def __init__(self, command: EngineCommand, model: str | None, options: Options) -> None:
        super().__init__()
        self.worker = EngineProcess(command, Open(model, options, False), self._record)

    @property
    def child(self) -> int:
        """The number of its process."""
        number = self.worker.process_id
        assert number is not None
        return number
