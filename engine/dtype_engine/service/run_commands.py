"""Runs commands on the model, one at a time, and emits their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from dtype_engine.checkpoint import refuse_changed, unchanged
from dtype_engine.checkpoint.memory_fit import shortfall
from dtype_engine.core.cancellation import CancelToken
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.foreign_code import foreign_code, with_type
from dtype_engine.core.options import RunSettings
from dtype_engine.core.throttle import Throttle
from dtype_engine.recipe import Recipe
from dtype_engine.results.attribution import near_floor
from dtype_engine.service import commands, events
from dtype_engine.service.commands import Command
from dtype_engine.service.jobs import FLOOR, KERNELS, LOSS_REMEDY, NONFINITE, WEIGHTS, Ask, Work
from dtype_engine.service.many_runs import ManyRuns
from dtype_engine.service.open_model import OpenModel
from dtype_engine.service.planned_losses import PlannedLosses
from dtype_engine.service.save_requests import ConvertRequest, RecipeRequest
from dtype_engine.service.worker_processes import WorkerProcesses

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport, ModuleDrift
    from dtype_engine.runtime.measure.listener import MeasurementListener
    from dtype_engine.runtime.measure.running_totals import RunningTotals
    from dtype_engine.runtime.session.session import Session

Emit = Callable[[events.Event], None]


class CommandRunner:
    """Runs commands on the worker's thread.

    emit_memory: called when casts have changed the memory in use. in_full: returns whether the running measurement must run all
    inputs and compare modules over all of them, regardless of the options.
    """

    def __init__(
        self,
        model: OpenModel,
        planned_losses: PlannedLosses,
        emit: Emit,
        emit_memory: Callable[[], None],
        in_full: Callable[[], bool],
    ) -> None:
        self._model = model
        self._planned_losses = planned_losses
        self._emit = emit
        self._emit_memory = emit_memory
        self._in_full = in_full
        self._report: DriftReport | None = None
        """The last measurement, or None if the model can't be run."""
        self._last: dict[str, object] = {}
        """The last result of each job that does not depend on the recipe, by the job's name."""
        self._processes = WorkerProcesses(model, lambda sentence: emit(events.Noticed(sentence)))
        self._many = ManyRuns(self._processes, emit)

    def close(self) -> None:
        self._processes.close()

    def run(self, command: Command, recipe: Recipe, settings: RunSettings, token: CancelToken) -> Iterable[Command]:
        """Run one command, and return further commands that complete it. Raises the session's errors."""
        session = self._model.session
        if session is not None:
            session.settings = settings
            session.model.memory.bytes_read = 0
        match command:
            case commands.Measure():
                return self._measure(session, recipe, command, token)
            case commands.CountStoredLosses():
                self._count_stored_losses(recipe, command, token)
            case Ask():
                self._answer(command, recipe, token)
            case commands.Download():
                self._download(recipe, token)
            case commands.OpenOverMemory():
                self._open_over_memory()
            case commands.Save():
                return self._save(command, settings, token)
            case _:
                assert session is not None, command  # the queue refuses all other commands without a session
                return self._run_on(session, command, recipe, token)
        return ()

    def _run_on(self, session: Session, command: Command, recipe: Recipe, token: CancelToken) -> Iterable[Command]:
        match command:
            case commands.SetInputs():
                return self._set_inputs(session, recipe, command.line, token)
            case commands.ApplyRecipe():
                session.use_recipe(recipe, cancelled=token)
            case commands.Scan():
                self._many.scan(session, recipe, command, token)
            case commands.MeasureRecipes():
                session.use_recipe(recipe, cancelled=token)  # restored afterwards
                self._many.recipes(session, recipe, command, token)
            case _:
                raise AssertionError(command)
        return ()

    def _answer(self, ask: Ask, recipe: Recipe, token: CancelToken) -> None:
        job = ask.traits
        about = recipe if job.of_recipe else None
        result = job.run(
            Work(
                self._model,
                self._processes,
                recipe,
                token,
                self._report,
                self._last.get(job.name),
                lambda what, done, total: self._emit(events.WorkingProgress(recipe, what, done, total)),
                lambda partial: self._emit(events.JobGrown(about, ask, partial)),
            ),
            ask.parameters,
        )
        if result is None:
            return
        if not job.of_recipe:
            self._last[job.name] = result
        self._emit(events.JobDone(about, ask, result))

    def _measure(
        self, session: Session | None, recipe: Recipe, command: commands.Measure, token: CancelToken
    ) -> Iterable[Command]:
        if session is None:
            return (commands.CountStoredLosses(command.read_values),)
        throttle = Throttle()

        def on_cast(done: int, total: int) -> None:
            if throttle.due():
                self._emit(events.CastingProgress(recipe, done, total))

        self._report = None
        session.use_recipe(recipe, on_progress=on_cast, cancelled=token)
        self._emit_memory()
        # Counting lost values reads the weights. If the model runs from the disk, the passes do so anyway.
        counts_later = session.model.memory.limited and session.no_forward is None
        if not counts_later:
            self._emit(events.CastDone(recipe, session.lost_values(token)))
        if session.no_forward is not None:
            return (Ask(LOSS_REMEDY.name),)
        report = self._report = self._drift(session, recipe, counts_later, token)
        if report is None:
            return ()
        if counts_later:
            self._emit(events.CastDone(recipe, report.lost))
        self._emit(events.Measured(recipe, report, session.settings))
        names = [NONFINITE.name, LOSS_REMEDY.name]
        if session.options.reference_model is not None:
            names.append(WEIGHTS.name)
        if _wants_floor(session, report):
            names.append(FLOOR.name)
        if session.wants_candidate_floor(report.output):
            names.append(KERNELS.name)
        return [Ask(name) for name in names]

    def _drift(self, session: Session, recipe: Recipe, counts_later: bool, token: CancelToken) -> DriftReport | None:
        """Measure the drift and return the report. If a step after the passes fails, such as counting lost values, emit what the
        passes measured and return None. counts_later: whether lost values are counted after the passes.
        """
        measured: list[DriftReport] = []
        try:
            return session.drift(self._listener(session, recipe, token, measured.append))
        except (Cancelled, UserError) as error:
            if not measured:
                if counts_later and isinstance(error, UserError):
                    why = "those that the casts lose are not counted, because the model did not run"
                    self._emit(events.CastDone(recipe, None, why))
                raise
            refuse_changed(session.model.identities)
            # The passes have ended, and only what follows them was stopped or failed.
            lost = session.model.known_losses(session.plan.dtypes)
            why = "those that the casts lose are not counted, because the count was stopped" if lost is None else ""
            if counts_later:
                self._emit(events.CastDone(recipe, lost, why))
            self._emit(events.Measured(recipe, replace(measured[0], lost=lost), session.settings))
            if isinstance(error, Cancelled):
                raise
            self._emit(events.Refused(commands.Measure.traits.name, error.sentence))
            return None

    def _listener(
        self, session: Session, recipe: Recipe, token: CancelToken, on_measured: Callable[[DriftReport], None]
    ) -> MeasurementListener:
        from dtype_engine.runtime.measure.listener import MeasurementListener

        sequences = Throttle()

        def on_modules(modules: tuple[ModuleDrift, ...]) -> None:
            refuse_changed(session.model.identities)  # figures of weights whose files have changed would be wrong
            self._emit(events.ModulesMeasured(recipe, modules))

        def on_sequence(totals: RunningTotals) -> None:
            if not totals.extent.whole and sequences.due():
                self._emit(events.OutputMeasured(recipe, session.settings, totals.partial()))

        return MeasurementListener(
            on_progress=lambda run, done, total: self._emit(events.MeasuringProgress(recipe, run, done, total)),
            on_modules=on_modules,
            on_sequence=on_sequence,
            on_measured=on_measured,
            cancelled=token,
            precision=lambda: None if self._in_full() else session.options.precision,
            all_modules=lambda: self._in_full() or session.options.modules == "exact",
        )

    def _count_stored_losses(self, recipe: Recipe, command: commands.CountStoredLosses, token: CancelToken) -> None:
        checkpoint = self._model.checkpoint
        assert checkpoint is not None
        if not recipe.rules:
            self._emit(events.CastDone(recipe, ()))  # no tree is needed, which may be large where a model can't run
            return
        with unchanged(checkpoint.identities):
            self._planned_losses.emit_losses(
                checkpoint, self._model.tree(), recipe, self._emit, token, command.read_values
            )

    def _set_inputs(self, session: Session, recipe: Recipe, line: str, token: CancelToken) -> Iterable[Command]:
        from dtype_engine.core.input_args import parse_inputs_line

        self._emit(events.WorkingProgress(recipe, "preparing the inputs", 0, 1))
        try:
            session.use_inputs(parse_inputs_line(session.options, line), token)
        except UserError as error:
            self._emit(events.InputsRefused(error.sentence))
            return ()
        if (summary := session.inputs_reading) is not None:
            self._emit(events.InputsReady(summary))
        return (commands.Measure(),)

    def _download(self, recipe: Recipe, token: CancelToken) -> None:
        source = self._model.source
        if source.hub is None:
            raise UserError(f"{source.title} is on this machine already")
        throttle = Throttle()

        def on_progress(what: str, done: int, total: int) -> None:
            if throttle.due(done == total):
                self._emit(events.WorkingProgress(recipe, what, done, total))

        path = source.hub.download(on_progress, token)
        self._model.opens_next = replace(source, path=path, hub=None), self._model.options

    def _open_over_memory(self) -> None:
        model = self._model
        if model.checkpoint is None or shortfall(model.checkpoint, model.options.max_memory) is None:
            raise UserError(f"{model.source.title} fits into memory")
        if model.options.over_memory or model.checkpoint.headers_alone:
            raise UserError(model.why_closed or f"{model.source.title} runs from the disk already")
        model.opens_next = model.source, replace(model.options, over_memory=True)

    def _save(self, command: commands.Save, settings: RunSettings, token: CancelToken) -> Iterable[Command]:
        """Run a save request, and emit its success or failure, which does not affect the recipe's metrics. Returns `ApplyRecipe` if
        the save has cast the model to another recipe than before.
        """
        from dtype_engine.service.writer import SaveContext, compose, run_save

        request = command.request
        recipe, session = command.recipe, self._model.session
        before = session.recipe if session is not None else recipe
        context = SaveContext(
            self._model,
            settings,
            recipe,
            self._planned_losses,
            lambda what, done, total: self._emit(events.SavingProgress(recipe, what, done, total)),
            token,
        )
        try:
            with foreign_code():
                if isinstance(request, RecipeRequest | ConvertRequest) and request.as_text:
                    self._emit(events.Composed(recipe, *compose(request, context)))
                else:
                    sentence, notices = run_save(request, context)
                    self._emit(events.Saved(recipe, True, sentence, notices))
        except UserError as error:
            self._emit(events.Saved(recipe, False, error.sentence))
        except Cancelled:
            self._emit(events.Saved(recipe, False, "stopped: nothing was written"))
        except Exception as error:
            self._emit(events.Saved(recipe, False, f"nothing was written: {with_type(error)}"))
        # A report may have cast the model to the recipe of its request; the current recipe is then applied again.
        return () if session is None or session.recipe == before else (commands.ApplyRecipe(),)


def _wants_floor(session: Session, report: DriftReport) -> bool:
    """Return whether to measure the noise floor. With the option "auto", a model that is run from the disk gets this measurement
    only if its drift may be noise.
    """
    option, memory = session.options.floor, session.model.memory
    if option == "auto" and memory.limited and not memory.keeps_pages:
        return near_floor(report.output)
    return option != "never"
