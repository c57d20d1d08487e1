"""One open model and what may be done with it, synchronously: the public API, and the only thing the worker calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward
from dtype_engine.core.options import Options
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.minimize import minimize
from dtype_engine.reports.notebook import session_html
from dtype_engine.results.attribution import AttributionReport, LossRemedy, NoiseFloor, NonFiniteDiagnosis
from dtype_engine.results.drift import DriftReport, ImplicitCastStats
from dtype_engine.results.inputs import InputsSummary
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.runs import Generation, SpeedReport
from dtype_engine.results.scan import ScanReport, SearchReport
from dtype_engine.runtime.inputs import Inputs, make_inputs, one_of_each_shape, summarize
from dtype_engine.runtime.inputs.text import with_next_tokens
from dtype_engine.runtime.measure.attribution import Attribution
from dtype_engine.runtime.measure.attribution import OnProgress as OnParts
from dtype_engine.runtime.measure.drift import DriftMeter, InFull, OnProgress, OnReading, Precision, budget_for
from dtype_engine.runtime.measure.generation import OnTokens, generate
from dtype_engine.runtime.measure.implicit_casts import aggregate
from dtype_engine.runtime.measure.loss_remedy import tried_remedy, untried_remedy
from dtype_engine.runtime.measure.modules.comparison import OnModules
from dtype_engine.runtime.measure.noise_floor import measure_noise_floor
from dtype_engine.runtime.measure.nonfinite import diagnose_nonfinite
from dtype_engine.runtime.measure.speed import REPEATS, OnPasses, measure_speed
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.scan.last_scan import LastScan, ScanTask
from dtype_engine.runtime.scan.scan import DEFAULT_DTYPES, OnEstimate, OnStep
from dtype_engine.runtime.session.cast_model import reading_weights
from dtype_engine.runtime.session.exportable import ExportableModel
from dtype_engine.runtime.session.notebook import show_in_notebooks
from dtype_engine.runtime.session.process_memory import reset_peaks
from dtype_engine.search.constraints import parse_bytes
from dtype_engine.search.pareto import Constraints
from dtype_engine.search.sensitivity import scalar_drift
from dtype_engine.search.solve import fixed_bytes, solve

show_in_notebooks()


class Session(ExportableModel):
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
        super().__init__(model, options.settings)
        self.options = options
        self.inputs = with_next_tokens(model, inputs) if inputs is not None else None
        self._meter: DriftMeter | None = None
        self._floor: tuple[Inputs, NoiseFloor] | None = None
        self._scan = LastScan()
        if inputs is None:
            try:
                self.inputs = make_inputs(model, options)
            except NoForward as error:
                self.no_forward = str(error)

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
        return self.inputs.description if self.inputs is not None else f"none: {self.no_forward}"

    @reading_weights
    def drift(
        self,
        on_progress: OnProgress = ignore,
        on_modules: OnModules = ignore,
        cancelled: IsCancelled = never,
        on_reading: OnReading = ignore,
        precision: Precision | None = None,
        modules_in_full: InFull | None = None,
    ) -> DriftReport:
        """Run reference and candidate over the inputs and compare their outputs.

        Args:
            on_progress: Called with the run ("reference", "candidate"), and how much of all passes is done, in inputs' elements.
            on_modules: Called with the drift of the modules compared so far.
            cancelled: Asked between module calls.
            on_reading: Called after every sequence: its `measurement()` has the figures so far.
            precision: Asked after every sequence for the relative error that is enough; None: all inputs. By default the options'.
            modules_in_full: Asked as often whether all rows of modules are compared, not a sample; by default as in the options.

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
            self._meter = DriftMeter(self.model, self.need_inputs(), budget=budget_for(self.options.reference_bytes))
        meter, wanted = self._meter, precision or (lambda: self.options.precision)
        in_full = modules_in_full or (lambda: self.options.modules == "exact")
        meter.settings, told = self.settings, (on_progress, on_modules, cancelled, on_reading)
        reset_peaks(self.model.device)
        measurement = meter.measure(
            *told, lambda extent: extent.is_within(wanted()), in_full, lambda extent: extent.rest_for(wanted())
        )
        return meter.report(measurement, self.recipe, self.memory(), self.lost_values(cancelled))

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
        return Attribution(self.model, self.need_inputs(), self.settings, rules).report(on_progress, cancelled)

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
            self._floor = inputs, measure_noise_floor(self.model, inputs, on_progress, cancelled)
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
        with ForwardRunner(self.model, self.settings, cancelled) as runner:
            return aggregate(runner.implicit_casts(self.need_inputs().batches[0]))

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
        with ForwardRunner(self.model, self.settings, cancelled) as runner:
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
        with ForwardRunner(self.model, self.settings, cancelled, watch=False) as runner:
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
        fixed, solution = fixed_bytes(front, self.tree), solve(front, self.tree, most, max_drift)
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
            planned_bytes=solution.bytes + fixed,
            predicted=solution.score,
            front=tuple(dataclasses.replace(point, bytes=point.bytes + fixed) for point in front.points),
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
        with ForwardRunner(self.model, self.settings, cancelled, watch=False) as runner:
            for tried in one_of_each_shape(inputs):
                runner.dry_run(tried)
        self.inputs, self.options, self.no_forward = inputs, options, None
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
