"""The status ends with the last job, in whatever order keys and the engine's events come."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import pytest
from tests.helpers.recording_engine import RecordingEngine, demo_tree

from dtype_engine.recipe import Recipe
from dtype_engine.service import events, outbox
from dtype_engine.service.commands import Request, Save
from dtype_engine.service.jobs import FLOOR, SPEED, Ask
from dtype_engine.service.queue import Queue, finish, job_names, merge, opened, reported, take
from dtype_engine.service.save_requests import ExportRequest, SaveRequest
from dtype_tui.state.controller import Controller
from dtype_tui.state.experiment import Experiment, ModelFacts


class QueuedEngine(RecordingEngine):
    """Runs nothing, but queues commands and tells of them as `Worker` does. What is on its way in either direction waits."""

    def __init__(self) -> None:
        self.to_app: deque[events.Event] = deque()
        super().__init__(lambda event: outbox.add(self.to_app, event))
        self.to_engine: deque[Request] = deque()
        self.queue = opened(Queue(waiting=()), "model")

    def request(self, request: Request) -> None:
        self.to_engine.append(request)

    def save(self, request: SaveRequest) -> None:
        self.to_engine.append(Save(request, Recipe()))

    def _use(self, queue: Queue) -> None:
        self.queue = reported(queue)
        if queue.running is None and (queue.stopped is not None or queue.dropped):
            self.emit(events.Stopped(queue.recipe, queue.stopped, queue.dropped))

    def _tell_jobs(self) -> None:
        running = job_names(self.queue, (self.queue.running,))[0] if self.queue.running is not None else ""
        self.emit(events.Jobs(running, job_names(self.queue, self.queue.waiting)))

    def receive(self) -> None:
        request = self.to_engine.popleft()
        self._use(merge(self.queue, request))
        self._tell_jobs()
        if self.queue.running is None and not self.queue.waiting:
            self.emit(events.Idle())

    def begin(self) -> None:
        self._use(take(self.queue))
        self._tell_jobs()
        if isinstance(self.queue.running, Save):
            self.emit(events.SavingProgress(Recipe(), "exporting: 310.00 MiB/s", 1, 2))

    def end(self) -> None:
        """End the running command: with its result or, if it was stopped, possibly without."""
        saves = isinstance(self.queue.running, Save)
        stopped = bool(self.queue.stopping) and random.random() < 0.5
        if saves:
            self.emit(events.Saved(Recipe(), not stopped, "exported"))
        follow_ups = () if saves or isinstance(self.queue.running, Ask) else (Ask(FLOOR.name),)
        self._use(finish(self.queue, "interrupted" if stopped and not saves else "done", follow_ups))
        if not self.queue.waiting:
            self._tell_jobs()
            self.emit(events.Idle())


@pytest.mark.parametrize("seed", range(60))
def test_status_ends_with_the_last_job(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    monkeypatch.setattr(random, "random", choose.random)
    engine = QueuedEngine()
    controller = Controller(
        Experiment(ModelFacts("demo", live=True), demo_tree()), engine, lambda *_: None, lambda: None
    )
    controller.activity.follow(events.Idle())
    keys = [
        lambda: controller.save(ExportRequest(Path("out"))),
        controller.stop,
        controller.measure,
        lambda: controller.ask_once(Ask(SPEED.name)),
    ]
    pressed = 0
    while pressed < 6 or engine.to_app or engine.to_engine or engine.queue.waiting or engine.queue.running:
        steps = [
            *([choose.choice(keys)] if pressed < 6 else []),
            *([lambda: controller.handle(engine.to_app.popleft())] if engine.to_app else []),
            *([engine.receive] if engine.to_engine else []),
            *([engine.begin] if engine.queue.waiting and engine.queue.running is None else []),
            *([engine.end] if engine.queue.running is not None else []),
        ]
        step = choose.choice(steps)
        pressed += step in keys
        step()
        if engine.queue.running is not None and not engine.to_app and not engine.to_engine:
            assert controller.activity.busy, "otherwise Esc would not stop it"
    assert controller.life.current_activity() == ("", None, "")
