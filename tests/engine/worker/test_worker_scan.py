"""Scans on the worker's thread: streaming estimates, pausing, stopping, going on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dtype_engine import Options, Recipe, Rule
from dtype_engine.checkpoint.source import locate
from dtype_engine.worker import events
from dtype_engine.worker.worker import Worker


class Heard:
    """Every event, and a way to wait for one."""

    def __init__(self) -> None:
        self.all: list[events.Event] = []
        self._more = threading.Condition()

    def __call__(self, event: events.Event) -> None:
        with self._more:
            self.all.append(event)
            self._more.notify_all()

    def wait(self, wanted: Callable[[events.Event], bool], start: int = 0) -> int:
        """The place behind the first event from `start` on that is wanted."""
        until = time.monotonic() + 120
        with self._more:
            at = start
            while True:
                while at < len(self.all):
                    if wanted(self.all[at]):
                        return at + 1
                    at += 1
                left = until - time.monotonic()
                assert left > 0, [type(event).__name__ for event in self.all[start:]]
                self._more.wait(left)


def idle(event: events.Event) -> bool:
    return isinstance(event, events.Idle)


def scanned(event: events.Event) -> bool:
    return isinstance(event, events.ScanUpdated)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def worker(heard: Heard) -> Iterator[Worker]:
    made = Worker(locate(None), Options(), heard)
    made.start()
    heard.wait(idle)
    yield made
    made.close()


def test_estimates_stream_a_newer_recipe_comes_first_and_the_scan_goes_on(worker: Worker, heard: Heard) -> None:
    start = len(heard.all)
    worker.scan(("int8",))
    heard.wait(scanned, start)
    recipe = Recipe((Rule("*.mlp", "bfloat16"),))
    worker.set_recipe(recipe)
    measured = heard.wait(lambda event: isinstance(event, events.Measured) and event.recipe == recipe, start)
    heard.wait(lambda event: isinstance(event, events.ScanUpdated) and event.finished, measured)
    counts = [event.report.sequences for event in heard.all if isinstance(event, events.ScanUpdated)]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_a_paused_scan_stops_all_the_same_and_the_next_is_not_paused(worker: Worker, heard: Heard) -> None:
    start = len(heard.all)
    worker.pause(True)
    worker.scan(("int8",))
    worker.cancel()
    worker.pause(True)
    worker.scan(("int8",))
    worker.cancel()
    worker.scan(("int8",))
    heard.wait(lambda event: isinstance(event, events.ScanUpdated) and event.finished, start)
