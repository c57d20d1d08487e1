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
from dtype_engine.core.text import printable
from dtype_engine.core.throttle import Throttle
from dtype_engine.recipe import Recipe
from dtype_engine.results.attribution import near_floor
from dtype_engine.worker import events
from dtype_engine.worker.commands import (
    ApplyRecipe,
    AttributeDrift,
    CheckFiles,
    Command,
    CompareWeights,
    CountStoredLosses,
    Download,
    EstimateActivations,
    FindLossRemedy,
    FindNonfinite,
    Generate,
    InspectWeight,
    Measure,
    MeasureFloor,
    MeasureRecipes,
    MeasureSpeed,
    OpenOverMemory,
    Save,
    Scan,
    SetInputs,
    TraceCasts,
)
from dtype_engine.worker.many_runs import ManyRuns
from dtype_engine.worker.opening import OpenModel, emit_inputs
from dtype_engine.worker.planned_losses import PlannedLosses
from dtype_engine.worker.save_requests import ConvertRequest, RecipeRequest

if TYPE_CHECKING:
    from dtype_engine.results.attribution import NoiseFloor
    from dtype_engine.results.drift import DriftReport, ModuleDrift
    from dtype_engine.results.runs import Generation
    from dtype_engine.runtime.measure.running_totals import RunningTotals
    from dtype_engine.runtime.session.session import Session

Emit = Callable[[events.Event], None]
_MOST_FINDINGS = 2_000
"""Maximum number of findings of a check of the model's files that are sent to the app. The app shows only the first ones of each
kind.
"""


class CommandRunner:
    """Runs commands on the worker's thread.

    emit_memory: called when the casts of a measurement have changed the memory in use. in_full: a function that returns whether the
    user wants the running measurement to run all inputs and to compare modules over all of them. If so, this overrides the options.
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
        self._emitted_floor: NoiseFloor | None = None
        self._many = ManyRuns(model, emit)

    def close(self) -> None:
        """End the worker processes."""
        self._many.close()

    def run(self, command: Command, recipe: Recipe, settings: RunSettings, token: CancelToken) -> Iterable[Command]:
        """Run one command. Returns the commands that the queue must run next to complete it. recipe, settings: the current ones.
        Raises Cancelled, and the session's errors.
        """
        session = self._model.session
        if session is not None:
            session.settings = settings
            if session.model.visits is not None:
                session.model.visits.bytes_read = 0
        match command:
            case Measure():
                return self._measure(session, recipe, command, token)
            case CountStoredLosses():
                self._count_stored_losses(recipe, command, token)
            case InspectWeight():
                self._inspect(recipe, command, token)
            case CheckFiles():
                self._check(recipe, token)
            case Download():
                self._download(recipe, token)
            case OpenOverMemory():
                self._open_over_memory()
            case Save():
                return self._save(command, settings, token)
            case _:
                assert session is not None, command  # the queue refuses all other commands without a session
                return self._run_on(session, command, recipe, token)
        return ()

    def _run_on(self, session: Session, command: Command, recipe: Recipe, token: CancelToken) -> Iterable[Command]:
        match command:
            case SetInputs():
                return self._set_inputs(session, recipe, command.line, token)
            case ApplyRecipe():
                session.use_recipe(recipe, cancelled=token)
            case FindNonfinite():
                progress = self._progress(recipe, "trying what makes the output finite")
                diagnosis = session.nonfinite(command.report, progress, token)
                if diagnosis is not None:
                    self._emit(events.NonfiniteFound(recipe, diagnosis))
            case FindLossRemedy():
                progress = self._progress(recipe, "trying what keeps the values")
                remedy = session.loss_remedy(command.report, progress, token)
                if remedy is not None:
                    self._emit(events.LossRemedyFound(recipe, remedy))
            case MeasureFloor():
                floor = session.floor(self._progress(recipe, "measuring the noise floor"), token)
                if floor is not self._emitted_floor:
                    self._emitted_floor = floor
                    self._emit(events.NoiseFloorMeasured(floor))
            case CompareWeights():
                session.use_recipe(recipe, cancelled=token)
                self._emit(events.WeightsCompared(recipe, session.weight_differences(token)))
            case TraceCasts():
                session.use_recipe(recipe, cancelled=token)
                self._emit(events.ImplicitCastsTraced(recipe, session.flow(token)))
            case AttributeDrift():
                session.use_recipe(recipe, cancelled=token)
                self._emit(events.AttributionReady(recipe, self._many.causes(session, recipe, token)))
            case Generate():
                self._generate(session, recipe, command, token)
            case MeasureSpeed():
                session.use_recipe(recipe, cancelled=token)

                def on_passes(variant: str, done: int, total: int) -> None:
                    self._emit(events.WorkingProgress(recipe, f"timing: {variant}", done, total))

                self._emit(events.SpeedMeasured(recipe, session.speed(on_passes, token)))
            case EstimateActivations():
                self._emit(events.WorkingProgress(recipe, "following passes", 0, 0))
                peaks = session.estimated_activations(command.contexts, command.batch, token)
                self._emit(events.ActivationsEstimated(recipe, peaks))
            case Scan():
                self._many.scan(session, recipe, command, token)
            case MeasureRecipes():
                session.use_recipe(recipe, cancelled=token)  # restored afterwards
                self._many.recipes(session, recipe, command, token)
            case _:
                raise AssertionError(command)
        return ()

    def _progress(self, recipe: Recipe, what: str) -> Callable[[int, int], None]:
        def on_progress(done: int, total: int) -> None:
            self._emit(events.WorkingProgress(recipe, what, done, total))

        return on_progress

    def _measure(
        self, session: Session | None, recipe: Recipe, command: Measure, token: CancelToken
    ) -> Iterable[Command]:
        if session is None:
            return (CountStoredLosses(command.read_values),)
        from dtype_engine.runtime.measure.listener import MeasurementListener

        identities, throttle = session.model.identities, Throttle()

        def on_cast(done: int, total: int) -> None:
            if throttle.due():
                self._emit(events.CastingProgress(recipe, done, total))

        def on_modules(modules: tuple[ModuleDrift, ...]) -> None:
            refuse_changed(identities)  # figures of weights whose files have changed would be wrong
            self._emit(events.ModulesMeasured(recipe, modules))

        sequences = Throttle()

        def on_sequence(totals: RunningTotals) -> None:
            if not totals.extent.whole and sequences.due():
                self._emit(events.OutputMeasured(recipe, session.settings, totals.partial()))

        measured: list[DriftReport] = []
        session.use_recipe(recipe, on_progress=on_cast, cancelled=token)
        self._emit_memory()
        # Counting lost values reads the weights. If the model runs from the disk, the passes do so anyway.
        counts_later = session.model.visits is not None and session.no_forward is None
        if not counts_later:
            self._emit(events.CastDone(recipe, session.lost_values(token)))
        if session.no_forward is not None:
            return (FindLossRemedy(None),)
        listener = MeasurementListener(
            on_progress=lambda run, done, total: self._emit(events.MeasuringProgress(recipe, run, done, total)),
            on_modules=on_modules,
            on_sequence=on_sequence,
            on_measured=measured.append,
            cancelled=token,
            precision=lambda: None if self._in_full() else session.options.precision,
            all_modules=lambda: self._in_full() or session.options.modules == "exact",
        )
        try:
            report: DriftReport = session.drift(listener)
        except (Cancelled, UserError) as error:
            if not measured:
                if counts_later and isinstance(error, UserError):
                    why = "those that the casts lose are not counted, because the model did not run"
                    self._emit(events.CastDone(recipe, None, why))
                raise
            refuse_changed(identities)
            # The passes have ended, and only what follows them was stopped or failed.
            lost = session.model.known_losses(session.plan.dtypes)
            why = "those that the casts lose are not counted, because the count was stopped" if lost is None else ""
            if counts_later:
                self._emit(events.CastDone(recipe, lost, why))
            self._emit(events.Measured(recipe, replace(measured[0], lost=lost), session.settings))
            if isinstance(error, Cancelled):
                raise
            self._emit(events.Refused(command.name, error.sentence))
            return ()
        if counts_later:
            self._emit(events.CastDone(recipe, report.lost))
        self._emit(events.Measured(recipe, report, session.settings))
        floor = (MeasureFloor(),) if _wants_floor(session, report) else ()
        weights = () if session.options.reference_model is None else (CompareWeights(),)
        return FindNonfinite(report), FindLossRemedy(report), *weights, *floor

    def _count_stored_losses(self, recipe: Recipe, command: CountStoredLosses, token: CancelToken) -> None:
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
        emit_inputs(session, self._emit)
        return (Measure(),)

    def _generate(self, session: Session, recipe: Recipe, command: Generate, token: CancelToken) -> None:
        throttle, shown = Throttle(), Throttle()

        def on_tokens(variant: str, done: int, most: int) -> None:
            if throttle.due():
                self._emit(events.WorkingProgress(recipe, f"generating: {variant}", done, most))

        def on_text(read: Callable[[], Generation]) -> None:
            if shown.due():
                self._emit(events.TextGrown(recipe, read()))

        session.use_recipe(recipe, cancelled=token)
        texts = session.generate(command.tokens, on_tokens, token, command.prompt or None, on_text)
        self._emit(events.Generated(recipe, texts))

    def _inspect(self, recipe: Recipe, command: InspectWeight, token: CancelToken) -> None:
        from dtype_engine.runtime.measure.weight_errors import inspect_live_weight, inspect_weight

        model, name, targets = self._model, command.tensor, command.targets
        self._emit(events.WorkingProgress(recipe, f"reading {printable(name, 60)}", 0, 1))
        if model.session is not None:
            with unchanged(model.session.model.identities):
                stats = inspect_live_weight(model.session.model, name, targets, token)
        else:
            assert model.checkpoint is not None
            with unchanged(model.checkpoint.identities):
                stats = inspect_weight(model.checkpoint, name, targets, token)
        self._emit(events.WeightInspected(recipe, name, stats))

    def _check(self, recipe: Recipe, token: CancelToken) -> None:
        from dtype_engine.checkpoint.check import check
        from dtype_engine.runtime.model.check_architecture import with_architecture

        model = self._model
        if model.checkpoint is None:
            raise UserError(f"{model.source.title} is code: a check reads the files of a checkpoint")

        def on_progress(what: str, done: int, total: int) -> None:
            if token():
                raise Cancelled
            self._emit(events.WorkingProgress(recipe, f"checking {what}", done, total))

        found = check(model.checkpoint, model.source.title, progress=on_progress)
        found = with_architecture(found, model.source, model.options, model.checkpoint)
        if (more := len(found.findings) - _MOST_FINDINGS) > 0:
            unchecked = (*found.unchecked, f"{more:,} further findings are left out here: dtype-engine check has them")
            found = replace(found, findings=found.findings[:_MOST_FINDINGS], unchecked=unchecked)
        self._emit(events.FilesChecked(recipe, found))

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

    def _save(self, command: Save, settings: RunSettings, token: CancelToken) -> Iterable[Command]:
        """Write the file or folder that the command requests, and emit the result. A failure is emitted as a `Saved` event, because
        it does not affect the recipe's metrics. Returns `ApplyRecipe` if the save has cast the model to a recipe that is not the
        current one, otherwise nothing.
        """
        from dtype_engine.worker.writer import SaveContext, compose, run_save

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
        return () if session is None or session.recipe == before else (ApplyRecipe(),)


def _wants_floor(session: Session, report: DriftReport) -> bool:
    """Return whether the noise floor is measured after a drift. For that, the model runs several times. If each run reads all
    weights from the disk, the floor is measured only if the drift is so small that it may be noise.
    """
    option, visits = session.options.floor, session.model.visits
    if option == "auto" and visits is not None and not visits.keeps_pages:
        return near_floor(report.output)
    return option != "never"
