"""The worker: a thread that owns the model. It accepts commands and emits events, and its callers never wait.

A request of the app becomes a command (`commands`), the queue decides which runs next (`queue`), and the thread runs them one
by one (`run_commands`). A running command that is superseded stops within one module call.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from dtype_engine.checkpoint.export_folder import check_typed_path
from dtype_engine.core.cancellation import CancelToken
from dtype_engine.core.errors import Cancelled, KernelError, UserError, exhausted, lacks_memory
from dtype_engine.core.foreign_code import foreign_code, with_type
from dtype_engine.core.options import Options
from dtype_engine.recipe import Recipe
from dtype_engine.service import events
from dtype_engine.service.commands import READ_ONLY, Cancel, Command, Measure, Request, Save, Scan
from dtype_engine.service.engine import CLOSE_WAIT_S, Engine
from dtype_engine.service.open_model import OpenModel
from dtype_engine.service.opening import open_model
from dtype_engine.service.planned_losses import PlannedLosses
from dtype_engine.service.queue import Queue, finish, job_names, merge, opened, reported, take

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.runtime.session.session import Session
    from dtype_engine.service.run_commands import CommandRunner
    from dtype_engine.service.save_requests import SaveRequest

NICENESS = 10
_SAMPLE_S = 0.25


class _MemorySampler:
    """A thread that emits four `Memory` events per second while `busy` and `session` are set."""

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
        while not self._closing.wait(_SAMPLE_S):
            self.busy.wait(1.0)
            if self.busy.is_set() and not self._closing.is_set():
                self.emit_now()


class Worker(Engine):
    """Opens `source` in the background, then runs commands. `emit` is called from the worker's threads and from its callers'
    threads.

    After opening, the worker measures the latest recipe, at first the empty one. If the model can't be loaded, commands about
    the stored tensors still work. read_headers: as in `open_model`.
    """

    def __init__(
        self, source: Source, options: Options, emit: Callable[[events.Event], None], read_headers: bool = False
    ) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._read_headers = read_headers
        self._changed = threading.Condition()
        """Must be held to read or change `_queue` and `_token`. Notified when the queue changes."""
        self._queue = Queue(settings=options.settings)
        self._token = CancelToken()
        """Cancelling this token stops the running command. Each command gets a new token."""
        self._closing = threading.Event()
        self._model: OpenModel | None = None
        """The opened model. It is set once, before `_opened` is set."""
        self._opened = threading.Event()
        """Set when the model is open, and by `close`."""
        self._planned_losses = PlannedLosses()
        self._memory = _MemorySampler(emit)
        self._thread = threading.Thread(target=self._work, name="dtype-engine", daemon=True)
        self._planning: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        """Whether the model is being opened, or a command other than a paused scan waits or runs."""
        queue = self._queue
        runs = queue.running is not None and not (isinstance(queue.running, Scan) and queue.paused)
        return queue.available == "opening" or runs or bool(queue.waiting)

    def start(self) -> None:
        self._thread.start()
        self._memory.thread.start()

    def request(self, request: Request) -> None:
        if self._options.read_only and isinstance(request, Command) and request.traits.names_path:
            self._emit(events.Refused(request.name, READ_ONLY))
            return
        with self._changed:
            queue = merge(self._queue, request)
            self._replace_queue(queue)
            self._emit_jobs()
            idle = queue.running is None and not queue.waiting
            if idle and (isinstance(request, Cancel) or queue.refused) and self._opened.is_set():
                self._emit(events.Idle())  # the thread may not have seen what was dropped, and so does not say it

    def save(self, request: SaveRequest) -> None:
        with self._changed:
            self.request(Save(request, self._queue.recipe))

    def plan_export(self) -> None:
        self._planning = [thread for thread in self._planning if thread.is_alive()]
        thread = threading.Thread(target=self._plan_export, args=(self._queue,), name="dtype-engine-plan", daemon=True)
        self._planning.append(thread)
        thread.start()

    def check_path(self, path: str, for_export: bool) -> None:
        try:
            if self._options.read_only:
                raise UserError(READ_ONLY)
            self._emit(events.PathChecked(path, check_typed_path(path, for_export, self._source.path)))
        except UserError as error:
            self._emit(events.PathChecked(path, False, error.sentence))

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Stop all work. Waits at most `wait_s` seconds, because the imports and kernels of a thread can't be interrupted."""
        with self._changed:
            self._closing.set()
            self._opened.set()
            self._token.cancel()
            self._changed.notify_all()
        self._memory.close()
        until = time.monotonic() + wait_s
        for thread in (self._thread, self._memory.thread, *self._planning):
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join(max(0.0, until - time.monotonic()))

    def _replace_queue(self, queue: Queue) -> None:
        """Make `queue` the current queue, and emit which commands were refused, stopped or dropped. The caller holds the lock."""
        self._queue = reported(queue)
        if queue.stopping:
            self._token.cancel()
        if isinstance(queue.running, Scan) and queue.paused:
            self._token.pause()
        else:
            self._token.resume()
        self._changed.notify_all()
        for name, reason in queue.refused:
            self._emit(events.Refused(name, reason))
        if queue.running is None and (queue.stopped is not None or queue.dropped):
            self._emit(events.Stopped(queue.recipe, queue.stopped, queue.dropped))

    def _emit_jobs(self) -> None:
        """Emit the names of the running and waiting commands. The caller must hold the lock, so that the last event is the
        newest.
        """
        running = self._queue.running
        name = job_names(self._queue, (running,))[0] if running is not None else ""
        self._emit(events.Jobs(name, job_names(self._queue, self._queue.waiting)))

    def _work(self) -> None:
        if sys.platform == "linux":  # where a thread has a niceness: the one that handles keys comes first
            own = threading.get_native_id()  # torch's threads inherit its niceness
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, own, max(NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
        while (following := self._serve()) is not None:
            self._source, self._options = following
            with self._changed:
                waiting = (*self._queue.waiting, Measure())
                self._replace_queue(replace(self._queue, available="opening", waiting=waiting))
        self._memory.busy.clear()
        self._emit(events.Idle())

    def _serve(self) -> tuple[Source, Options] | None:
        """Open the model and run commands on it. Returns (source, options) of the next model, or None once the worker is closed."""
        from dtype_engine.service.run_commands import CommandRunner  # the first paint does not need it

        self._memory.busy.set()
        model = open_model(self._source, self._options, self._emit, self._read_headers)
        self._model, self._memory.session = model, model.session
        self._opened.set()
        reason = model.why_closed or f"{self._source.title} could not be opened"
        with self._changed:
            self._replace_queue(opened(self._queue, model.available, reason))
        runner = CommandRunner(
            model, self._planned_losses, self._emit, self._memory.emit_now, lambda: self._queue.in_full
        )
        while model.available != "nothing" and model.opens_next is None and (begun := self._next()) is not None:
            self._memory.busy.set()
            self._run(runner, *begun)
        runner.close()
        return model.opens_next

    def _next(self) -> tuple[Queue, CancelToken] | None:
        """Wait for a command. Returns (the queue with the command running, its cancel token), or None if the worker is closed."""
        with self._changed:
            if not self._queue.waiting and not self._closing.is_set():
                self._memory.busy.clear()
                self._emit_jobs()
                self._emit(events.Idle())
            while not self._queue.waiting and not self._closing.is_set():
                self._changed.wait()
            if self._closing.is_set():
                return None
            queue, token = take(self._queue), CancelToken()
            self._token = token
            self._replace_queue(queue)
            self._emit_jobs()
            return queue, token

    def _run(self, runner: CommandRunner, queue: Queue, token: CancelToken) -> None:
        """Run `queue.running`. A failure is emitted as an event, and the session continues."""
        command, recipe = queue.running, queue.recipe
        assert command is not None
        outcome: Literal["done", "failed", "interrupted"] = "failed"
        follow_ups: Iterable[Command] = ()
        try:
            with foreign_code():
                follow_ups = runner.run(command, recipe, queue.settings, token)
            outcome = "done"
        except Cancelled:
            outcome = "interrupted"
        except Exception as error:
            self._emit_failure(recipe, command, error)
        self._memory.emit_now()
        with self._changed:
            self._replace_queue(finish(self._queue, outcome, follow_ups))

    def _emit_failure(self, recipe: Recipe, command: Command, error: Exception) -> None:
        """Emit that `command` failed: as `Failed` for a measurement, which then has no metrics, otherwise as `Refused`."""
        small = "not enough memory; cast to a smaller dtype or use shorter inputs"
        other = small if lacks_memory(error) else exhausted(error) or with_type(error)
        message = error.sentence if isinstance(error, UserError) else other
        if isinstance(command, Measure):
            self._emit(events.Failed(recipe, message, error.module if isinstance(error, KernelError) else None))
        else:
            self._emit(events.Refused(command.name, message))

    def _plan_export(self, queue: Queue) -> None:
        """Wait until the model is open, and emit what an export would write, or why it can't be exported."""
        from dtype_engine.service.writer import SaveContext, plan_export

        self._opened.wait()
        if self._model is None:
            return  # the worker was closed before the model was open
        recipe = queue.recipe
        context = SaveContext(self._model, queue.settings, recipe, self._planned_losses, cancelled=self._closing.is_set)
        try:
            with foreign_code():
                self._emit(events.ExportPlanned(recipe, plan_export(context)))
        except Exception as error:
            reason = error.sentence if isinstance(error, UserError) else with_type(error)
            self._emit(events.ExportPlanned(recipe, None, reason))
