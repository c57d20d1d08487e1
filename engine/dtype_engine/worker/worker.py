"""One thread that owns the session: commands in, events out. The caller never waits.

Only the newest recipe counts: `set_recipe` supersedes what is under way, within one module call. A second, small
thread looks at memory four times a second while the first one works.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtype_engine.checkpoint import refuse_unreadable, unchanged
from dtype_engine.core.cancellation import CancelToken
from dtype_engine.core.errors import Cancelled, KernelError, NoForward, UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.text import printable
from dtype_engine.recipe import Recipe
from dtype_engine.worker import events
from dtype_engine.worker.planned_losses import PlannedLosses
from dtype_engine.worker.queue import Job, JobName, JobQueue
from dtype_engine.worker.save_requests import SaveRequest

if TYPE_CHECKING:
    from dtype_engine.checkpoint import Checkpoint
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.core.tree import Tree
    from dtype_engine.results.attribution import Floor
    from dtype_engine.results.drift import DriftReport, ModuleDrift
    from dtype_engine.results.scan import ScanReport
    from dtype_engine.runtime.session import Session
    from dtype_engine.worker.writer import Workshop

Emit = Callable[[events.Event], None]
Task = Callable[[Recipe], None]
_MEMORY_EVERY_S = 0.25
_LOOK_EVERY_S = 0.2
_CLOSE_WAIT_S = 2.0
_NICER = 5


def _give_way() -> None:
    """Let other threads, the one that answers keys above all, come before this one and those that torch starts from it.

    Linux has a niceness for every thread, inherited by what it starts; other systems have none.
    """
    if sys.platform == "linux":
        own = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICER)


class Worker:
    """Opens `source` in the background, then casts and measures as it is told. `emit` is called from its threads.

    After opening it applies and measures the recipe it was given last (at first the empty one). `read_headers`: the caller
    has not seen all of the checkpoint's headers and wants the tree of them first. Where there is no live model, questions
    about the tensors themselves are answered all the same.
    """

    def __init__(self, source: Source, options: Options, emit: Emit, read_headers: bool = False) -> None:
        self._source = source
        self._read_headers = read_headers
        self._checkpoint: Checkpoint | None = None
        self._options = options
        self._emit = emit
        self._session: Session | None = None
        self._known_tree: Tree | None = None
        """Without a session: the tree with module classes, where the architecture is known."""
        self._why_closed = ""
        """Why there is no session."""
        self._changed = threading.Condition()
        self._recipe = Recipe()
        self._settings = options.settings
        self._waiting = True
        self._unmeasured = True
        """A measurement of the recipe in force was asked for and has not come to its end."""
        self._unfinished: tuple[Recipe, DriftReport] | None = None
        """A measurement whose figures are told and that has not been looked at closer to the end."""
        self._inputs_line: str | None = None
        """The inputs asked for last, until they are looked at."""
        self._floor_told: Floor | None = None
        self._planned_losses = PlannedLosses()
        self._asked_to_read = False
        """Told to measure, which without a live model means to read values, however many."""
        self._asked = JobQueue()
        self._running: Job | None = None
        self._phase: JobName = "measure"
        """What of the running job is under way: its own name, or that of a part of it."""
        self._dropped: tuple[JobName, ...] = ()
        """What waited when the user stopped the engine, until the screen is told."""
        self._closing = threading.Event()
        self._stop_now = threading.Event()
        self._gate = CancelToken(self._stop_now)
        self._stopped_by_user = False
        self._opened = threading.Event()
        """The model is open, or opening it has failed."""
        self._plans: list[threading.Thread] = []
        self._memory_lock = threading.Lock()
        self._busy = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dtype-engine", daemon=True)
        self._sampler = threading.Thread(target=self._sample, name="dtype-engine-memory", daemon=True)

    def start(self) -> None:
        """Begin to open the model."""
        self._thread.start()
        self._sampler.start()

    def set_recipe(self, recipe: Recipe) -> None:
        """Cast to `recipe` and measure; whatever is under way for another recipe stops."""
        with self._changed:
            self._recipe, self._waiting = recipe, True
            self._interrupt()

    def follow_recipe(self, recipe: Recipe) -> None:
        """Know what is in force by another recipe that plans the same: nothing is measured anew, unless it had not been."""
        with self._changed:
            if self._waiting or self._unmeasured or self._session is None:
                self.set_recipe(recipe)
                return
            self._recipe = recipe
        self._ask("recipe", self._with_session(lambda session, recipe: session.use_recipe(recipe)))

    def measure(self) -> None:
        """Measure the recipe in force once more."""
        self._asked_to_read = True
        self.set_recipe(self._recipe)

    def set_settings(self, settings: RunSettings) -> None:
        """Run candidates in another way from now on, and measure the recipe in force so."""
        self._settings = settings
        self.measure()

    def set_inputs(self, line: str) -> None:
        """Run on other inputs from now on, as `input_files.typed` reads the line, and measure the recipe in force on them.

        What is under way for the old ones stops; it begins again where the new ones are refused.
        """
        with self._changed:
            self._inputs_line = line
            self._interrupt()

    def _interrupt(self) -> None:
        """Something newer goes first; what is being written is finished for the recipe that it was asked for."""
        if self._running is None or not self._running.finishes:
            self._stop_now.set()
        self._tell_jobs()
        self._changed.notify_all()

    def flow(self) -> None:
        """Tell the implicit casts of one forward pass under the recipe in force, after what is under way."""
        self._ask("flow", self._with_session(self._tell_flow))

    def causes(self) -> None:
        """Tell which modules the drift of the recipe in force arises in, after what is under way."""
        self._ask("causes", self._with_session(self._tell_causes))

    def generate(self, tokens: int) -> None:
        """Let reference and candidate write, after what is under way."""
        self._ask("generate", self._with_session(lambda session, recipe: self._tell_text(session, recipe, tokens)))

    def speed(self) -> None:
        """Time forward passes, after what is under way."""
        self._ask("speed", self._with_session(self._tell_speed))

    def scan(self, dtypes: tuple[str, ...]) -> None:
        """Scan in these dtypes after what is under way, or go on with it; a newer recipe is measured in between."""
        self._ask("scan", self._with_session(lambda session, recipe: self._tell_scan(session, recipe, dtypes)))

    def pause(self, waiting: bool) -> None:
        """Let a scan wait where it is, or go on."""
        (self._gate.pause if waiting else self._gate.resume)()

    def look_at(self, name: str, targets: tuple[str, ...]) -> None:
        """Read one tensor's values, after what is under way: exponents, and the error of a cast to each of `targets`."""
        self._ask("values", lambda recipe: self._tell_weight(recipe, name, targets))

    def plan_export(self) -> None:
        """Tell what an export of the recipe in force would write. It is arithmetic, so it waits for the model to be open and for
        nothing else.
        """
        recipe = self._recipe
        self._plans = [thread for thread in self._plans if thread.is_alive()]
        name = "dtype-engine-plan"
        self._plans.append(threading.Thread(target=self._tell_export_plan, args=(recipe,), name=name, daemon=True))
        self._plans[-1].start()

    def save(self, wish: SaveRequest) -> None:
        """Write what is wished for, of the recipe in force now, after what is under way. Only `cancel` stops it."""
        asked_for = self._recipe
        self._ask("write", lambda recipe: self._save(asked_for, wish), finishes=True)

    def _ask(self, name: JobName, run: Task, finishes: bool = False) -> None:
        with self._changed:
            if self._opened.is_set() and self._session is None and self._checkpoint is None:
                self._emit(events.Refused(name, f"{self._source.title} could not be opened"))
                return
            self._asked.add(Job(name, run, finishes))
            self._tell_jobs()
            self._changed.notify_all()

    def cancel(self, name: str | None = None) -> None:
        """Stop what is under way and drop what waits; the recipe stays, with the casts made so far completed at the next command.

        name: only jobs of this name; whatever else is under way or waits goes on.
        """
        with self._changed:
            dropped = self._asked.remove(name)
            if name is None:
                self._dropped += (*self._waiting_first(), *dropped)
                self._waiting = self._unmeasured = False
                self._inputs_line = None
            if name is None or (self._running is not None and self._running.name == name):
                self._stopped_by_user = True
                self._stop_now.set()
                self._gate.resume()  # what stops waits no more, nor does what comes next
            self._tell_jobs()
            self._changed.notify_all()

    def _tell_jobs(self) -> None:
        """Say what is under way and what waits. Called with the lock held, so that the last that is said is how it is."""
        running = self._running.name if self._running is not None else ""
        self._emit(events.Jobs(running, (*self._waiting_first(), *(job.name for job in self._asked))))

    def _waiting_first(self) -> tuple[JobName, ...]:
        """What goes before all that was asked for, where there is a model to do it with or may be one."""
        live = self._session is not None or not self._opened.is_set()
        inputs: tuple[JobName, ...] = ("inputs",) if live and self._inputs_line is not None else ()
        return (*inputs, "measure") if self._waiting and (live or self._checkpoint is not None) else inputs

    def close(self) -> None:
        """Stop everything. Waits at most two seconds; the threads are daemons, so a long import does not hold up the
        exit.
        """
        with self._changed:
            self._closing.set()
            self._stop_now.set()
            self._changed.notify_all()
        self._busy.set()  # wakes the sampler
        until = time.monotonic() + _CLOSE_WAIT_S
        for thread in (self._thread, self._sampler, *self._plans):
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        _give_way()
        self._busy.set()
        try:
            self._session = self._open()
        except UserError as error:
            self._why_closed = str(error)
            later = (
                isinstance(error, NoForward) and self._checkpoint is not None and self._checkpoint.config is not None
            )
            self._emit(events.OpenFailed(str(error), later))
            if later:
                self._tell_classes()
        except Exception as error:
            self._emit(events.OpenFailed(f"{self._source.title}: opening it failed: {type(error).__name__}: {error}"))
        self._opened.set()
        while self._session is not None or self._checkpoint is not None:
            command = self._next()
            if command is None:
                break
            self._busy.set()
            if self._session is not None:
                self._session.settings = self._settings
            self._guarded(*command)
        self._busy.clear()
        self._emit(events.Idle())

    def _open(self) -> Session:
        started = time.perf_counter()
        if self._source.kind == "checkpoint":
            self._emit(events.LoadingProgress("reading the headers"))
            self._checkpoint = self._source.open()
            assert self._checkpoint is not None
            if self._read_headers:
                tree = self._checkpoint.tree()
                assert tree.names  # listed here and not on the way to the first frame of a filter
                self._emit(events.HeadersRead(tree, self._checkpoint.notices))
            from dtype_engine.checkpoint.memory_fit import shortfall

            if reason := shortfall(self._checkpoint):
                raise NoForward(f"{self._source.title}: {reason}")
        self._emit(events.LoadingProgress("importing torch"))
        from dtype_engine.runtime.opening import open_session

        session = open_session(
            self._source,
            self._options,
            say=lambda step: self._emit(events.LoadingProgress(step)),
            refused=lambda why: self._emit(events.InputsRefused(f"{why}. The default inputs are in force.")),
        )
        self._emit(
            events.ModelReady(
                tree=session.tree,
                class_name=type(session.model.module).__name__,
                device=str(session.model.device),
                seconds=time.perf_counter() - started,
                inputs=session.inputs.description if session.inputs is not None else "none",
                notices=session.model.notices,
                no_forward=session.no_forward,
            )
        )
        self._tell_inputs(session)
        return session

    def _tell_classes(self) -> None:
        """The tree of a model that can't be run, with the classes and ties of its architecture, if that is known."""
        from dtype_engine.runtime.model.describe import describe

        assert self._checkpoint is not None
        self._emit(events.LoadingProgress("reading the architecture"))
        try:
            known = describe(self._source, self._options, self._checkpoint).tree
        except UserError:
            known = self._checkpoint.tree()
        if known.has_classes:
            self._known_tree = known
        assert known.names
        self._emit(events.HeadersRead(known, ()))

    def _next(self) -> tuple[Recipe, Job] | None:
        """Wait for a command: the recipe to go for and what to do with it, or None to end. New inputs go first, then
        measuring."""
        with self._changed:
            self._running = None
            self._tell_dropped()
            if not self._told_to():
                self._busy.clear()
                self._tell_jobs()
                self._emit(events.Idle())
            while not self._told_to():
                self._changed.wait()
                self._tell_dropped()
            self._stopped_by_user = False
            self._stop_now.clear()
            if self._closing.is_set():
                return None
            if (line := self._inputs_line) is not None:
                self._unmeasured, self._waiting = self._unmeasured or self._waiting, False
                self._inputs_line = None
                job = Job(
                    "inputs",
                    self._with_session(lambda session, recipe: self._change_inputs(session, recipe, line)),
                )
            elif self._waiting:
                self._waiting = False
                job = Job("measure", self._cast_and_measure)
            else:
                job = self._asked.next()
            self._running, self._phase = job, job.name
            self._tell_jobs()
            return self._recipe, job

    def _tell_dropped(self, stopped: JobName | None = None) -> None:
        """Say what the user stopped, if anything, and what was dropped with it."""
        dropped, self._dropped = self._dropped, ()
        if stopped is not None or dropped:
            self._emit(events.Stopped(self._recipe, stopped, dropped))

    def _told_to(self) -> bool:
        return self._waiting or self._inputs_line is not None or bool(self._asked) or self._closing.is_set()

    def _change_inputs(self, session: Session, recipe: Recipe, line: str) -> None:
        self._emit(events.WorkingProgress(recipe, "preparing the inputs", 0, 1))
        try:
            from dtype_engine.core.input_args import typed

            session.use_inputs(typed(session.options, line), self._stop_now.is_set)
        except Cancelled:
            with self._changed:
                if not self._stopped_by_user and self._inputs_line is None:
                    self._inputs_line = line  # a new recipe came in between: the inputs are still wanted
            raise
        except UserError as error:
            self._emit(events.InputsRefused(str(error)))
            if not self._unmeasured:
                if self._unfinished is not None and self._unfinished[0] == recipe:
                    self._look_closer(session, *self._unfinished)
                return
        else:
            self._tell_inputs(session)
        self._apply_and_measure(session, recipe)

    def _tell_inputs(self, session: Session) -> None:
        reading = session.inputs_reading
        if reading is not None:
            self._emit(events.InputsReady(reading))

    def _tell_flow(self, session: Session, recipe: Recipe) -> None:
        session.use_recipe(recipe, cancelled=self._stop_now.is_set)
        self._emit(events.ImplicitCastsTraced(recipe, session.flow(self._stop_now.is_set)))

    def _tell_causes(self, session: Session, recipe: Recipe) -> None:
        cancelled, told = self._stop_now.is_set, _Throttle()
        session.use_recipe(recipe, cancelled=cancelled)

        def on_parts(done: int, total: int) -> None:
            told(
                lambda: self._emit(events.WorkingProgress(recipe, "running each module as cast by itself", done, total))
            )

        self._emit(events.AttributionReady(recipe, session.causes(on_parts, cancelled)))

    def _look_closer(self, session: Session, recipe: Recipe, report: DriftReport) -> None:
        """What belongs to a measurement and takes more passes: why it is not finite, and, once for the inputs, its floor."""
        cancelled = self._stop_now.is_set

        def working(what: str) -> Callable[[int, int], None]:
            return lambda done, total: self._emit(events.WorkingProgress(recipe, what, done, total))

        self._phase = "nonfinite"
        found = session.nonfinite(report, working("trying what makes the output finite"), cancelled)
        if found is not None:
            self._emit(events.NonfiniteFound(recipe, found))
        self._phase = "losses"
        self._tell_loss_remedy(session, recipe, report)
        self._phase = "floor"
        floor = session.floor(working("the reference against itself"), cancelled)
        if floor is not self._floor_told:
            self._floor_told = floor
            self._emit(events.FloorMeasured(floor))
        self._unfinished = None

    def _tell_loss_remedy(self, session: Session, recipe: Recipe, report: DriftReport | None) -> None:
        def on_trial(done: int, total: int) -> None:
            self._emit(events.WorkingProgress(recipe, "trying what keeps the values", done, total))

        remedy = session.loss_remedy(report, on_trial, self._stop_now.is_set)
        if remedy is not None:
            self._emit(events.LossRemedyFound(recipe, remedy))

    def _tell_text(self, session: Session, recipe: Recipe, tokens: int) -> None:
        cancelled, told = self._stop_now.is_set, _Throttle()
        session.use_recipe(recipe, cancelled=cancelled)

        def on_tokens(which: str, done: int, most: int) -> None:
            told(lambda: self._emit(events.WorkingProgress(recipe, f"generating: {which}", done, most)))

        self._emit(events.Generated(recipe, session.generate(tokens, on_tokens, cancelled)))

    def _tell_speed(self, session: Session, recipe: Recipe) -> None:
        cancelled = self._stop_now.is_set
        session.use_recipe(recipe, cancelled=cancelled)

        def on_passes(what: str, done: int, total: int) -> None:
            self._emit(events.WorkingProgress(recipe, f"timing: {what}", done, total))

        self._emit(events.SpeedMeasured(recipe, session.speed(on_passes, cancelled)))

    def _tell_scan(self, session: Session, recipe: Recipe, dtypes: tuple[str, ...]) -> None:
        told = _Throttle()

        def on_progress(what: str, done: int, total: int | None) -> None:
            told(lambda: self._emit(events.WorkingProgress(recipe, what, done, total or max(1, done))))

        def on_estimate(report: ScanReport) -> None:
            self._emit(events.ScanUpdated(report, report.sequences == report.all_sequences))

        report = session.scan(dtypes, on_progress=on_progress, on_estimate=on_estimate, cancelled=self._gate)
        self._emit(events.ScanUpdated(report, True))

    def _cast_and_measure(self, recipe: Recipe) -> None:
        asked, self._asked_to_read = self._asked_to_read, False
        if self._session is not None:
            self._apply_and_measure(self._session, recipe)
        elif self._checkpoint is not None:
            self._phase = "losses"
            tree = self._known_tree or self._checkpoint.tree()
            with unchanged(self._checkpoint.identities):
                self._planned_losses.tell(self._checkpoint, tree, recipe, self._emit, self._stop_now.is_set, asked)

    def _apply_and_measure(self, session: Session, recipe: Recipe) -> None:
        cancelled = self._stop_now.is_set
        told = _Throttle()

        def on_modules(modules: tuple[ModuleDrift, ...]) -> None:
            refuse_unreadable(session.model.identities)  # no figure of weights that are not there any more
            self._emit(events.ModulesMeasured(recipe, modules))

        self._unmeasured, self._unfinished, self._phase = True, None, "measure"
        session.use_recipe(
            recipe,
            on_progress=lambda done, total: told(lambda: self._emit(events.CastingProgress(recipe, done, total))),
            cancelled=cancelled,
        )
        self._tell_memory(session)
        self._emit(events.CastDone(recipe, session.lost_values(cancelled)))
        if session.no_forward is None:
            report = session.drift(
                on_progress=lambda run, done, total: self._emit(events.MeasuringProgress(recipe, run, done, total)),
                on_modules=on_modules,
                cancelled=cancelled,
            )
            self._emit(events.Measured(recipe, report))
            self._unmeasured, self._unfinished = False, (recipe, report)
            self._look_closer(session, recipe, report)
        else:
            self._phase = "losses"
            self._tell_loss_remedy(session, recipe, None)
        self._unmeasured = False
        self._tell_memory(session)

    def _with_session(self, run: Callable[[Session, Recipe], None]) -> Task:
        """A task that needs the live model; where there is none it does nothing: the caller has been told so."""

        def task(recipe: Recipe) -> None:
            if self._session is not None:
                run(self._session, recipe)

        return task

    def _tell_weight(self, recipe: Recipe, name: str, targets: tuple[str, ...]) -> None:
        from dtype_engine.runtime.measure.weight_errors import look_at, look_at_live

        self._emit(events.WorkingProgress(recipe, f"reading {printable(name, 60)}", 0, 1))
        if self._session is not None:
            with unchanged(self._session.model.identities):
                reading = look_at_live(self._session.model, name, targets, self._stop_now.is_set)
        elif self._checkpoint is not None:
            with unchanged(self._checkpoint.identities):
                reading = look_at(self._checkpoint, name, targets, self._stop_now.is_set)
        else:
            raise UserError("the model is not open")
        self._emit(events.WeightInspected(recipe, name, reading))

    def _workshop(self, recipe: Recipe) -> Workshop:
        from dtype_engine.worker.writer import Workshop, progress

        told = progress(
            lambda what, done, total: self._emit(events.SavingProgress(recipe, what, done, total)), time.perf_counter
        )
        return Workshop(
            self._source, self._options, self._settings, recipe, self._session, self._checkpoint, told, self._stop_now.is_set,
            self._planned_losses, self._known_tree, self._why_closed,
        )  # fmt: skip

    def _tell_export_plan(self, recipe: Recipe) -> None:
        """Runs in a thread of its own."""
        while not self._opened.wait(_LOOK_EVERY_S):
            if self._closing.is_set():
                return
        try:
            self._emit(events.ExportPlanned(recipe, self._workshop(recipe).plan_export()))
        except UserError as error:
            self._emit(events.ExportPlanned(recipe, None, str(error)))
        except Exception as error:
            self._emit(events.ExportPlanned(recipe, None, _unforeseen(error)))

    def _save(self, recipe: Recipe, wish: SaveRequest) -> None:
        """Refusals are told as such: they say nothing about the drift of the recipe."""
        try:
            sentence, notices = self._workshop(recipe).fulfil(wish)
            self._emit(events.Saved(recipe, True, sentence, notices))
        except UserError as error:
            self._emit(events.Saved(recipe, False, str(error)))
        except Cancelled:
            self._emit(events.Saved(recipe, False, "stopped: nothing was written"))
        except Exception as error:
            self._emit(events.Saved(recipe, False, f"nothing was written: {_unforeseen(error)}"))
        # A report measures for the recipe that it was asked for; what was in force before is so again.
        if self._session is not None and not self._waiting and self._session.recipe != self._recipe:
            self._session.use_recipe(self._recipe)

    def _guarded(self, recipe: Recipe, job: Job) -> None:
        """Do one thing for a recipe; however it ends, the session goes on and the screen is told."""
        try:
            job.run(recipe)
        except Cancelled:
            with self._changed:
                if self._stopped_by_user:
                    self._tell_dropped(self._phase)
                elif job.name not in (
                    "measure",
                    "inputs",
                ):  # what is newer goes first, then this, which was asked for too
                    self._asked.put_back(job)
        except KernelError as error:
            self._failed(recipe, job, str(error), error.module)
        except UserError as error:
            self._failed(recipe, job, str(error))
        except MemoryError:
            self._failed(recipe, job, "not enough memory; cast to a smaller dtype or use shorter inputs")
        except Exception as error:
            self._failed(recipe, job, _unforeseen(error))
        if self._session is not None:
            self._tell_memory(self._session)

    def _failed(self, recipe: Recipe, job: Job, message: str, module: str | None = None) -> None:
        """A measurement that fails has no figures; anything else that is refused takes none away."""
        if job.name in ("measure", "inputs") and self._phase == "measure":
            self._emit(events.Failed(recipe, message, module))
        else:
            self._emit(events.Refused(self._phase, message))
            if self._phase == "inputs":
                with self._changed:
                    self._waiting = self._waiting or self._unmeasured  # what the new inputs interrupted

    def _tell_memory(self, session: Session) -> None:
        """Read and told as one step: of two threads that do so the last that is heard is then the newest."""
        with self._memory_lock:
            self._emit(events.Memory(session.recipe, session.memory()))

    def _sample(self) -> None:
        while not self._closing.wait(_MEMORY_EVERY_S):
            self._busy.wait(1.0)
            session = self._session
            if session is not None and self._busy.is_set() and not self._closing.is_set():
                self._tell_memory(session)


def _unforeseen(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class _Throttle:
    """Lets a call through at most ten times a second."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, say: Callable[[], None]) -> None:
        now = time.perf_counter()
        if now - self._last >= 0.1:
            self._last = now
            say()
