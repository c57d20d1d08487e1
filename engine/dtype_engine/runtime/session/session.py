"""One open model and what may be done with it, synchronously: the public API, and the only thing the worker calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from dtype_engine.checkpoint import unchanged
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.hints import ON_THE_COMMAND_LINE, fill_hints
from dtype_engine.core.options import Options
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Plan, Recipe, Rule, make_plan
from dtype_engine.recipe.minimize import minimize
from dtype_engine.reports.notebook import session_html
from dtype_engine.results.attribution import AttributionReport, LossRemedy, NoiseFloor, NonFiniteDiagnosis
from dtype_engine.results.drift import DriftReport, ImplicitCastStats
from dtype_engine.results.export import ExportReport
from dtype_engine.results.inputs import InputsSummary
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.memory import MemoryStats
from dtype_engine.results.runs import Generation, SpeedReport
from dtype_engine.results.scan import Prediction, ScanReport, SearchReport
from dtype_engine.runtime.inputs import Inputs, make_inputs, one_of_each_shape, summarize
from dtype_engine.runtime.inputs.text import with_next_tokens
from dtype_engine.runtime.measure.attribution import Attribution
from dtype_engine.runtime.measure.attribution import OnProgress as OnParts
from dtype_engine.runtime.measure.drift import DriftMeter, budget_for
from dtype_engine.runtime.measure.generation import OnTokens, generate
from dtype_engine.runtime.measure.implicit_casts import implicit_casts
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.measure.loss_remedy import tried_remedy, untried_remedy
from dtype_engine.runtime.measure.noise_floor import measure_noise_floor
from dtype_engine.runtime.measure.nonfinite import diagnose_nonfinite
from dtype_engine.runtime.measure.speed import REPEATS, OnPasses, measure_speed
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.scan.last_scan import LastScan, ScanTask
from dtype_engine.runtime.scan.scan import DEFAULT_DTYPES, OnEstimate, OnStep
from dtype_engine.runtime.session.casting import Casting
from dtype_engine.runtime.session.casting import OnProgress as OnCast
from dtype_engine.runtime.session.notebook import show_in_notebooks
from dtype_engine.runtime.session.process_memory import memory_stats, reset_peaks
from dtype_engine.search.constraints import parse_bytes
from dtype_engine.search.pareto import Constraints, ParetoFront, make_front
from dtype_engine.search.sensitivity import predict, scalar_drift
from dtype_engine.search.solve import solve

if TYPE_CHECKING:
    from dtype_engine.runtime.export import Contents

show_in_notebooks()

P = ParamSpec("P")
T = TypeVar("T")


def reading_weights(method: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """A method that reads weights: it raises UserError where their files are not, or no longer, those that were opened."""

    @functools.wraps(method)
    def reads(self: Session, /, *arguments: P.args, **named: P.kwargs) -> T:
        with unchanged(self.model.identities):
            return method(self, *arguments, **named)

    return reads


class Session:
    """A live model, the recipe in force, and its measurements. Make one with `dtype_engine.open`.

    Methods that read weights raise UserError where the model's files are no longer those that were opened.

    Example:
        >>> print(session)
        Session: demo on cpu
          rules   none: as stored
          memory  stored 2.70 MiB → planned 2.70 MiB
          inputs  1 sequence of your prompts, 27 tokens
    """

    def __init__(self, model: LiveModel, options: Options, inputs: Inputs | None = None) -> None:
        self.model = model
        self.options = options
        self.settings = options.settings
        """How it is run. May be replaced between measurements."""
        self.inputs = with_next_tokens(model, inputs) if inputs is not None else None
        """What it is run on; None where it can't be run."""
        self.why_no_forward: str | None = None
        """Why the model can't be run, with hints that the command line and the app fill in."""
        """Why it can't be run, as a sentence."""
        self.scanned: ScanReport | None = None
        """The last scan, which `predict` and `search` go by."""
        self._casting = Casting(model)
        self._behavior = ModelBehavior()
        self._meter: DriftMeter | None = None
        self._floor: tuple[Inputs, NoiseFloor] | None = None
        self._scan = LastScan()
        if inputs is None:
            try:
                self.inputs = make_inputs(model, options)
            except NoForward as error:
                self.why_no_forward = error.sentence

    def __repr__(self) -> str:
        return (
            f"Session: {printable(self.model.title, 100)} on {self.model.device}\n"
            f"  rules   {printable(str(self.recipe) if self.recipe.rules else 'none: as stored', 300)}\n"
            f"  memory  stored {human_bytes(self.plan.stored_bytes)} → planned {human_bytes(self.plan.planned_bytes)}\n"
            f"  inputs  {printable(self._inputs_in_words(), 300)}"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return session_html(self.model.title, self.tree, self.plan, self._inputs_in_words())

    def _inputs_in_words(self) -> str:
        if self.inputs is not None:
            return self.inputs.description
        return f"none: {self.no_forward}"

    @property
    def no_forward(self) -> str | None:
        """Why the model can't be run; None where it can.

        >>> session.no_forward
        """
        return None if self.why_no_forward is None else fill_hints(self.why_no_forward, ON_THE_COMMAND_LINE)

    @property
    def tree(self) -> Tree:
        """Modules and tensors, with classes, ties and buffers.

        Example:
            >>> session.tree.stored_bytes
            2831232
        """
        return self.model.tree

    @property
    def recipe(self) -> Recipe:
        """The recipe in force.

        Example:
            >>> session.recipe
            Recipe(rules=())
        """
        return self.plan.recipe

    @property
    def plan(self) -> Plan:
        """The dtype of every tensor under the recipe in force.

        Example:
            >>> set(session.plan.dtypes.values())
            {'float32'}
        """
        return self._casting.plan

    @reading_weights
    def cast(self, pattern: str, dtype: str) -> Plan:
        """Add a rule and cast what it takes, in place.

        Args:
            pattern: Names of modules or tensors, with wildcards; or `type:Class`, or `re:` and a regular expression.
            dtype: What to cast to: a name or short name, or "stored".

        Returns:
            The plan of all rules, the new one last.

        Raises:
            PatternError: The pattern can't be read, or takes too long to match.
            UserError: The dtype is unknown, or the pattern takes nothing.

        Example:
            >>> plan = session.cast("*.mlp", "bfloat16")
            >>> plan.planned_bytes < plan.stored_bytes
            True
        """
        self._casting.add(Rule.make(pattern, dtype))
        return self.plan

    @reading_weights
    def apply(self, recipe: Recipe, on_progress: OnCast | None = None, cancelled: IsCancelled = never) -> None:
        """Put a whole recipe in force, as a step that `undo` takes back.

        Rules that take nothing have no effect; `plan.unmatched` names them.

        Args:
            recipe: The rules; the last that takes a tensor decides.
            on_progress: Called with the tensors cast and how many are to be.
            cancelled: Asked between tensors.

        Raises:
            TooSlow: A pattern takes too long to match; nothing is changed.
            Cancelled: `cancelled()` was true; the next recipe completes the cast.

        Example:
            >>> session.apply(de.Recipe.of([de.Rule.parse("*=float16"), de.Rule.parse("*norm*=float32")]))
            >>> len(session.recipe)
            2
        """
        self._casting.push(recipe, on_progress, cancelled)

    @reading_weights
    def use_recipe(self, recipe: Recipe, on_progress: OnCast | None = None, cancelled: IsCancelled = never) -> None:
        """Put a whole recipe in force without a step to undo, for callers with a history of their own; else as `apply`.

        Args:
            recipe: The rules; the last that takes a tensor decides.
            on_progress: Called with the tensors cast and how many are to be.
            cancelled: Asked between tensors.

        Raises:
            TooSlow: A pattern takes too long to match; nothing is changed.
            Cancelled: `cancelled()` was true; the next recipe completes the cast.

        Example:
            >>> session.use_recipe(de.Recipe.of([de.Rule.parse("*=bf16")]))
            >>> str(session.recipe)
            '*=bfloat16'
        """
        self._casting.use(recipe, on_progress, cancelled)

    @reading_weights
    def undo(self) -> bool:
        """Go back to the recipe before.

        Returns:
            False when there is nothing left to undo.

        Example:
            >>> _ = session.cast("*", "float16")
            >>> session.undo(), session.redo()
            (True, True)
        """
        return self._casting.undo()

    @reading_weights
    def redo(self) -> bool:
        """Go forward again to what `undo` took back.

        Returns:
            False when nothing was undone.

        Example:
            >>> session.redo()
            False
        """
        return self._casting.redo()

    def putting_back(self) -> AbstractContextManager[None]:
        """Casts made meanwhile are undone: the recipe in force is cast again at the end.

        Example:
            >>> name = next(iter(session.model.weights))
            >>> with session.putting_back():
            ...     session.model.apply(session.plan.dtypes | {name: "bfloat16"})
            >>> session.model.weights[name].dtype
            'float32'
        """
        return self._casting.putting_back()

    @reading_weights
    def lost_values(self, cancelled: IsCancelled = never, plan: Plan | None = None) -> tuple[ValueLoss, ...]:
        """The weights of which a cast makes values infinite or zero; rounding is no loss.

        Args:
            cancelled: Asked between tensors.
            plan: Count for this plan; by default for the recipe in force.

        Returns:
            One entry a weight that loses values, with their numbers.

        Raises:
            Cancelled: `cancelled()` was true.

        Example:
            >>> _ = session.cast("*", "bfloat16")
            >>> session.lost_values()
            ()
        """
        return self.model.lost_values(None if plan is None else plan.dtypes, cancelled)

    def predict(self, recipe: Recipe | None = None) -> Prediction:
        """Predict the drift of a recipe by the last scan: the sum of its weights' scores.

        Args:
            recipe: By default the one in force.

        Returns:
            The drift in the scan's unit. Raises UserError when nothing was scanned, or not in a dtype of the recipe.

        Example:
            >>> _ = session.scan(["bfloat16"], draws=1)
            >>> session.predict(de.Recipe.of([de.Rule.parse("*=bf16")])).value > 0
            True
        """
        if self.scanned is None:
            raise UserError("nothing was scanned yet, so no drift can be predicted")
        plan = self.plan if recipe is None else make_plan(self.tree, recipe)
        return predict(self.tree, plan, self.scanned, self.scanned.scores())

    def front(self, constraints: Constraints | None = None) -> ParetoFront:
        """The Pareto front of the model's bytes against predicted drift, by the last scan.

        Args:
            constraints: Which weights stay as stored, share a dtype, or may have some dtypes only.

        Returns:
            The points, the largest model first. Raises UserError when nothing was scanned.

        Example:
            >>> _ = session.scan(["bfloat16"], draws=1)
            >>> len(session.front().points) > 1
            True
        """
        if self.scanned is None:
            raise UserError("nothing was scanned yet, so there is nothing to search in")
        return make_front(self.tree, self.scanned.scores(), constraints or Constraints())

    def memory(self) -> MemoryStats:
        """Bytes of the weights and of the process now.

        Returns:
            `peak_rss_bytes` counts since the last measurement began; a figure that the system does not have is None.

        Example:
            >>> session.memory().stored_bytes
            2831232
        """
        return memory_stats(self.model, self.plan, self.kept_outputs)

    def export(
        self,
        folder: str | Path,
        max_shard_size: int | str = "5GB",
        on_bytes: OnCast = ignore,
        cancelled: IsCancelled = never,
        force: bool = False,
        incomplete: bool = False,
    ) -> ExportReport:
        """Write a checkpoint in the dtypes of the recipe in force; the source is not changed.

        Under `quantize_activations="weights"` the checkpoint says so, for the formats that runtimes quantise them in. In NVFP4 the
        inputs are run for it first: their largest values are kept.

        Args:
            folder: A new folder.
            max_shard_size: The most bytes in one file of weights, as a number or as "5GB".
            on_bytes: Called with the bytes written and all there are.
            cancelled: Asked between pieces; nothing is left behind then.
            force: Replace a folder that holds something, when all is written.
            incomplete: Export what is there of a checkpoint that lacks tensors.

        Returns:
            What was written, in bytes and seconds.

        Raises:
            UserError: The folder can't be written, holds something, or there is no room; or the checkpoint lacks tensors.
            NoForward: Inputs have to be run, and can't be.
            Cancelled: `cancelled()` was true.

        Example:
            >>> report = session.export(folder / "export")
            >>> model = de.load_pretrained(folder / "export")
        """
        from dtype_engine.runtime.export import export

        contents = self.export_contents(cancelled)
        lost = self.lost_values(cancelled)
        return export(contents, Path(folder), max_shard_size, on_bytes, cancelled, force, lost, incomplete)

    @reading_weights
    def export_contents(self, cancelled: IsCancelled = never) -> Contents:
        """What `export` writes. Inputs are run where a format keeps a scale of theirs. Raises as `export` does.

        Example:
            >>> session.export_contents().nbytes == session.plan.planned_bytes
            True
        """
        from dtype_engine.runtime.export import of_live
        from dtype_engine.runtime.export.input_scales import needs_calibration
        from dtype_engine.runtime.measure.activation_ranges import input_ranges

        planned = self.plan.dtypes
        contents = of_live(self.model, self.recipe, planned, self.settings)
        if not needs_calibration(contents):
            return contents
        names = [item.name for item in contents.items if item.input_scale is not None]
        ranges = input_ranges(self.model, self.need_inputs(), self.settings, names, cancelled, self._behavior)
        return of_live(self.model, self.recipe, planned, self.settings, ranges)

    def need_inputs(self) -> Inputs:
        """The inputs. Raises NoForward where there are none.

        Example:
            >>> len(session.need_inputs().batches)
            1
        """
        if self.inputs is None:
            raise NoForward(self.why_no_forward or "the model can't be run")
        return self.inputs

    @reading_weights
    def drift(self, listener: MeasurementListener | None = None, cancelled: IsCancelled = never) -> DriftReport:
        """Run reference and candidate over the inputs and compare their outputs.

        Args:
            listener: Is called while the measurement runs, and asked how precise it has to be.
            cancelled: Asked between module calls, where there is no listener.

        Returns:
            Figures of the main output and of every module, memory in bytes, times in seconds; `sequences` says over how much.

        Raises:
            NoForward: The model can't be run.
            KernelError: An operation has no kernel for a dtype.
            Cancelled: `cancelled()` was true.

        Example:
            >>> _ = session.cast("*", "bfloat16")
            >>> 0 < session.drift().output.max_abs < 1
            True
        """
        if self._meter is None:
            budget = budget_for(self.options.reference_bytes)
            self._meter = DriftMeter(self.model, self.need_inputs(), budget=budget, behavior=self._behavior)
        self._meter.settings = self.settings
        if listener is None:
            listener = MeasurementListener(cancelled=cancelled)
        listener = dataclasses.replace(
            listener,
            precision=listener.precision or (lambda: self.options.precision),
            all_modules=listener.all_modules or (lambda: self.options.modules == "exact"),
        )
        reset_peaks(self.model.device)
        totals = self._meter.measure(listener)
        return self._meter.report(totals, self.recipe, self.memory(), self.lost_values(listener.cancelled))

    @reading_weights
    def causes(self, on_progress: OnParts = ignore, cancelled: IsCancelled = never) -> AttributionReport:
        """Attribute the drift of the recipe in force to modules: each is run as cast by itself, all else as the reference.

        Args:
            on_progress: Called with the parts run and all.
            cancelled: Asked between module calls.

        Returns:
            The contributions, the largest first, and their sum. Raises as `drift` does, and UserError under `torch.autocast`.

        Example:
            >>> _ = session.cast("*.layers.0.mlp", "int8")
            >>> [part.name.split(".")[-2] for part in session.causes().causes]
            ['mlp', 'mlp', 'mlp']
        """
        rules = tuple(map(str, self.recipe.rules))
        return Attribution(self.model, self.need_inputs(), self.settings, rules, self._behavior).report(
            on_progress, cancelled
        )

    @reading_weights
    def floor(self, on_progress: OnParts = ignore, cancelled: IsCancelled = never) -> NoiseFloor:
        """The noise floor: the drift of the reference against itself, for the same sums in another order.

        Args:
            on_progress: Called with the positions compared and all.
            cancelled: Asked between module calls.

        Returns:
            The worst figures of all variants; measured once for the inputs. Raises as `drift` does.

        Example:
            >>> session.floor() is session.floor()
            True
        """
        inputs = self.need_inputs()
        if self._floor is None or self._floor[0] is not inputs:
            self._floor = inputs, measure_noise_floor(self.model, inputs, self._behavior, on_progress, cancelled)
        return self._floor[1]

    @reading_weights
    def nonfinite(
        self, report: DriftReport, on_trial: OnParts = ignore, cancelled: IsCancelled = never
    ) -> NonFiniteDiagnosis | None:
        """Where values stop being finite, and which rules mend it.

        Args:
            report: A measurement of the recipe in force.
            on_trial: Called with the remedies tried and all.
            cancelled: Asked between module calls.

        Returns:
            None where all values are finite. Raises as `drift` does.

        Example:
            >>> session.nonfinite(session.drift()) is None
            True
        """
        output = report.output
        if self._meter is None or not (output.nonfinite or output.nonfinite_reference):
            return None
        bad = not output.nonfinite
        with self.putting_back():
            return diagnose_nonfinite(self._meter, self.tree, self.recipe, report.modules, bad, on_trial, cancelled)

    @reading_weights
    def loss_remedy(
        self, report: DriftReport | None, on_trial: OnParts = ignore, cancelled: IsCancelled = never
    ) -> LossRemedy | None:
        """The rules that keep the values which the recipe in force loses.

        Args:
            report: A measurement of the recipe in force, to try the rules out beside; None for untried ones.
            on_trial: Called with the rules tried and all.
            cancelled: Asked between module calls.

        Returns:
            None where nothing is lost but by rounding. Raises Cancelled.

        Example:
            >>> session.loss_remedy(None) is None
            True
        """

        def count(name: str, dtype: str) -> ValueLoss | None:
            return self.model.weights[name].count_loss(dtype, cancelled)

        if report is None or self._meter is None:
            reason = self.no_forward or "the recipe was not measured"
            return untried_remedy(self.tree, self.plan, self.lost_values(cancelled), count, reason)
        with self.putting_back():
            return tried_remedy(self._meter, self.tree, self.plan, report, count, on_trial, cancelled)

    @reading_weights
    def flow(self, cancelled: IsCancelled = never) -> tuple[ImplicitCastStats, ...]:
        """Every implicit cast of one forward pass over the first input.

        Args:
            cancelled: Asked between module calls.

        Returns:
            Elements and calls by module, operation and dtypes. Raises as `drift` does.

        Example:
            >>> _ = session.cast("*.mlp", "bfloat16")
            >>> len(session.flow()) > 0
            True
        """
        with ForwardRunner(self.model, self.settings, cancelled, behavior=self._behavior) as runner:
            return implicit_casts(runner, self.need_inputs().batches[0])

    @reading_weights
    def generate(
        self, tokens: int = 32, on_tokens: OnTokens = ignore, cancelled: IsCancelled = never
    ) -> tuple[Generation, ...]:
        """Let reference and candidate continue every input greedily.

        Args:
            tokens: The most tokens to write.
            on_tokens: Called with the run ("reference", "candidate"), tokens written, and the most that all runs will write.
            cancelled: Asked after every token.

        Returns:
            Both texts for each input. Raises as `drift` does; NoForward also for a model that does not generate.

        Example:
            >>> session.generate(2)[0].differs  # nothing is cast
            False
        """
        with ForwardRunner(self.model, self.settings, cancelled, behavior=self._behavior) as runner:
            return generate(runner, self.need_inputs(), tokens, on_tokens)

    @reading_weights
    def speed(
        self,
        on_passes: OnPasses = ignore,
        cancelled: IsCancelled = never,
        repeats: int = REPEATS,
    ) -> SpeedReport:
        """Time whole forward passes in the reference's dtype, as stored, and as cast.

        Args:
            on_passes: Called with the row that is timed, passes done and all.
            cancelled: Asked between module calls.
            repeats: Passes a row, after one to warm up.

        Returns:
            Seconds a pass: the median, the fastest and the slowest of each row. Raises as `drift` does.

        Example:
            >>> [row.what for row in session.speed(repeats=3).rows]
            ['reference', 'candidate']
        """
        with ForwardRunner(self.model, self.settings, cancelled, watch=False, behavior=self._behavior) as runner:
            return measure_speed(runner, self.need_inputs(), self.plan, on_passes, repeats)

    @reading_weights
    def scan(
        self,
        dtypes: Sequence[str] = DEFAULT_DTYPES,
        draws: int | None = None,
        exact: bool = False,
        save: Path | None = None,
        on_progress: OnStep = ignore,
        on_estimate: OnEstimate = ignore,
        cancelled: IsCancelled = never,
    ) -> ScanReport:
        """How much every weight matters in each of `dtypes`, everything else as in the reference, whatever recipe is in force.

        A scan that was cancelled goes on where it was when the same is asked for again.

        Args:
            dtypes: What to cast to.
            draws: Backward passes a sequence, to estimate from; by default 24 over all, at least 4.
            exact: Measure each weight in each dtype alone, instead of estimating.
            save: A file to keep the scan in after every sequence, and to go on from.
            on_progress: Called with what is done, how much of it, and all.
            on_estimate: Called with the scores so far.
            cancelled: Asked between module calls.

        Returns:
            Scores in nats per position, or another unit that the report names. Raises as `drift` does, and UserError for a
            saved scan of something else.

        Example:
            >>> scan = session.scan(["bfloat16"], draws=1)
            >>> session.search(budget=2_000_000).planned_bytes <= 2_000_000
            True
        """
        task = self.scan_task(dtypes, draws, exact, save)
        with self.putting_back() if exact else nullcontext():
            self.scanned = task.run(on_progress, on_estimate, cancelled)
            return self.scanned

    def scan_task(self, dtypes: Sequence[str], draws: int | None, exact: bool, save: Path | None) -> ScanTask:
        """The scan that `scan` runs, in its parts; the same one as long as the same is asked for. Raises as `scan` does.

        Example:
            >>> session.scan_task(["bfloat16"], None, False, None).pending()
            [0]
        """
        return self._scan.get(self.model, self.need_inputs(), self.settings, dtypes, draws, exact, save)

    def search(
        self,
        budget: int | str | None = None,
        max_drift: float | None = None,
        constraints: Constraints | None = None,
        measure: bool = False,
        cancelled: IsCancelled = never,
    ) -> SearchReport:
        """The best recipe for one limit, by the last scan.

        Args:
            budget: The most bytes of the whole model, as a number or as "12GiB" or "45%" of those stored; the predicted drift is
                then the lowest.
            max_drift: The most predicted drift; the bytes are then the fewest.
            constraints: Which weights stay as stored, share a dtype, or may have some dtypes only.
            measure: Put the recipe in force, and measure it too.
            cancelled: Asked between module calls of the measurement.

        Returns:
            The rules, their bytes and drift, and the Pareto front. Raises UserError when nothing was scanned, and OutOfReach
            when nothing meets the limit.

        Example:
            >>> _ = session.scan(["bfloat16"], draws=1)
            >>> session.search(budget="100%").predicted
            0.0
        """
        front = self.front(constraints)
        most = parse_bytes(budget, self.tree.stored_bytes) if isinstance(budget, str) else budget
        solution = solve(front, most, max_drift)
        recipe = minimize(self.tree, solution.dtypes)
        if measure:
            self.apply(recipe, cancelled=cancelled)
        measured = scalar_drift(self.drift(cancelled=cancelled).output) if measure else None
        assert self.scanned is not None
        return SearchReport(
            model=self.model.title,
            unit=self.scanned.unit,
            rules=tuple(map(str, recipe.rules)),
            stored_bytes=self.tree.stored_bytes,
            planned_bytes=solution.bytes,
            predicted=solution.score,
            front=tuple(front.points),
            measured=measured,
            notices=self.model.notices,
            lost=self.lost_values(cancelled, make_plan(self.tree, recipe)),
        )

    @reading_weights
    def use_inputs(self, options: Options, cancelled: IsCancelled = never) -> None:
        """Run on the inputs of `options` from now on; its other fields do not matter here.

        Args:
            options: They are tried with the reference: one call, of given tensors one of each shape.
            cancelled: Asked between module calls.

        Raises:
            UserError: They can't be made, do not fit the model or do not run. Everything is as before, as after Cancelled.

        Example:
            >>> session.use_inputs(de.Options(prompts=("one short prompt",)))
        """
        inputs = make_inputs(self.model, options)
        with ForwardRunner(self.model, self.settings, cancelled, watch=False, behavior=self._behavior) as runner:
            for tried in one_of_each_shape(inputs):
                runner.reference(runner.reference_call(tried))
        self.inputs, self.options, self.why_no_forward = inputs, options, None
        self._meter = self.scanned = None
        self._scan = LastScan()

    @property
    def inputs_reading(self) -> InputsSummary | None:
        """What the model is run on, call by call; None where it can't be run.

        Example:
            >>> len(session.inputs_reading.batches)
            1
        """
        return summarize(self.inputs) if self.inputs is not None else None

    @property
    def kept_outputs(self) -> tuple[int, int] | None:
        """Bytes of outputs kept for the next measurement, and the most that may be; None before the first.

        >>> de.open().kept_outputs  # nothing is measured
        """
        return None if self._meter is None else (self._meter.kept_bytes, self._meter.budget)
