"""One open model and what may be done with it, synchronously: the public API, and the only thing the worker calls."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from dtype_engine.checkpoint import refuse_unreadable, unchanged
from dtype_engine.checkpoint.source import Source, locate
from dtype_engine.core import dtypes as dtype_table
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward, OutOfReach, UserError
from dtype_engine.core.input_args import typed
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import History, Plan, Recipe, Rule, explain_no_match, make_plan
from dtype_engine.recipe.minimize import compress
from dtype_engine.results.attribution import AttributionReport, Floor, NonFiniteDiagnosis
from dtype_engine.results.drift import (
    DriftReport,
    Generation,
    ImplicitCastStats,
    MemoryStats,
    Prediction,
    ScanReport,
    SearchReport,
    Seconds,
    SpeedReport,
)
from dtype_engine.results.export import ExportReport
from dtype_engine.results.inputs import InputsSummary
from dtype_engine.results.losses import LossRemedy, ValueLoss
from dtype_engine.runtime import process_memory as memory
from dtype_engine.runtime.inputs import Inputs, from_values, make_inputs, one_of_each_shape, reading
from dtype_engine.runtime.inputs.text import with_next_tokens
from dtype_engine.runtime.measure.attribution import Causes
from dtype_engine.runtime.measure.attribution import OnProgress as OnParts
from dtype_engine.runtime.measure.comparison import OnModules
from dtype_engine.runtime.measure.drift import DriftMeter, OnProgress
from dtype_engine.runtime.measure.generation import OnTokens, generate
from dtype_engine.runtime.measure.implicit_casts import summed
from dtype_engine.runtime.measure.loss_remedy import tried_remedy, untried_remedy
from dtype_engine.runtime.measure.noise_floor import measure_floor
from dtype_engine.runtime.measure.nonfinite import diagnose_nonfinite
from dtype_engine.runtime.measure.speed import REPEATS, OnPasses, measure_speed
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.load import Say, load, pick_device
from dtype_engine.runtime.passes.runner import ForwardRunner, reference_name
from dtype_engine.runtime.scan.exact import exact_sensitivities
from dtype_engine.runtime.scan.scan import DEFAULT_DTYPES, OnEstimate, Scan
from dtype_engine.runtime.scan.scan import OnProgress as OnScan
from dtype_engine.search.pareto import Constraints, Front, make_items
from dtype_engine.search.sensitivity import predict, scalar_drift

P = ParamSpec("P")
T = TypeVar("T")


def _reading_weights(method: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """A method that reads weights: it raises UserError where their files are not, or no longer, those that were opened."""

    @functools.wraps(method)
    def reads(self: Session, /, *arguments: P.args, **named: P.kwargs) -> T:
        with unchanged(self.model.identities):
            return method(self, *arguments, **named)

    return reads


class Session:
    """A live model, the recipe in force, and its measurements. Make one with `dtype_engine.open`."""

    def __init__(self, model: LiveModel, options: Options, inputs: Inputs | None = None) -> None:
        started = time.perf_counter()
        self.model = model
        self.options = options
        self.settings: RunSettings = options.settings
        self.no_forward: str | None = None
        self.inputs = with_next_tokens(model, inputs) if inputs is not None else None
        self._history = History()
        self._plan = make_plan(model.tree, self.recipe)
        self._meter: DriftMeter | None = None
        self._floor: tuple[Inputs, Floor] | None = None
        self._scan: Scan | None = None
        self.scanned: ScanReport | None = None
        if inputs is None:
            try:
                self.inputs = make_inputs(model, options)
            except NoForward as error:
                self.no_forward = str(error)
        self.opening_seconds = time.perf_counter() - started

    @property
    def tree(self) -> Tree:
        """Modules and tensors, with classes, ties and buffers."""
        return self.model.tree

    @property
    def recipe(self) -> Recipe:
        """The recipe in force."""
        return self._history.recipe

    @property
    def plan(self) -> Plan:
        """The dtype of every tensor under the recipe in force."""
        return self._plan

    @_reading_weights
    def cast(self, pattern: str, dtype: str) -> Plan:
        """Add a rule and cast what it takes, in place. Raises UserError for a bad pattern or dtype, or one that takes
        nothing.
        """
        rule = Rule.make(pattern, dtype)
        recipe = self.recipe.then(rule)
        plan = make_plan(self.tree, recipe)
        plan.refuse_too_slow()
        if not plan.selections[-1]:
            raise UserError(explain_no_match(self.tree, rule.pattern, plan.selections[-1]))
        self.apply(recipe)
        return self._plan

    @_reading_weights
    def apply(
        self,
        recipe: Recipe,
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: IsCancelled = never,
    ) -> None:
        """Put a whole recipe in force and cast what it changes. Rules that take nothing have no effect (see
        `plan.unmatched`). Raises TooSlow, and changes nothing, for a pattern that takes too long to match.
        """
        make_plan(self.tree, recipe).refuse_too_slow()
        self._history.push(recipe)
        self._cast(on_progress, cancelled)

    @_reading_weights
    def undo(self) -> bool:
        """Go back to the recipe before. False when there is nothing left to undo."""
        moved = self._history.undo()
        self._cast()
        return moved

    @_reading_weights
    def redo(self) -> bool:
        """Go forward again. False when nothing was undone."""
        moved = self._history.redo()
        self._cast()
        return moved

    def _cast(self, on_progress: Callable[[int, int], None] | None = None, cancelled: IsCancelled = never) -> None:
        if self._plan.recipe != self.recipe:
            self._plan = make_plan(self.tree, self.recipe)
        self.model.apply(self._plan.dtypes, on_progress, cancelled)

    @_reading_weights
    def lost_values(self, cancelled: IsCancelled = never, plan: Plan | None = None) -> tuple[ValueLoss, ...]:
        """The weights that lose values, besides rounding them, under the recipe in force or another plan. Raises Cancelled."""
        return self.model.lost_values(None if plan is None else plan.dtypes, cancelled)

    @_reading_weights
    def drift(
        self,
        on_progress: OnProgress = lambda run, done, total: None,
        on_modules: OnModules = lambda modules: None,
        cancelled: IsCancelled = never,
    ) -> DriftReport:
        """Run reference and candidate over the inputs and compare.

        Raises NoForward when the model can't be run, KernelError when an operation has no kernel for a dtype, and
        Cancelled.
        """
        inputs = self._need_inputs()
        if self._meter is None:
            self._meter = DriftMeter(self.model, inputs)
            if self.options.reference_bytes is not None:
                self._meter.budget = self.options.reference_bytes
        self._meter.settings = self.settings
        memory.reset_peak_rss()
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.model.device)
        found = self._meter.measure(on_progress, on_modules, cancelled)
        return DriftReport(
            model=self.model.title,
            device=str(self.model.device),
            reference=reference_name(self.model),
            rules=tuple(map(str, self.recipe.rules)),
            settings=str(self.settings),
            inputs=inputs.description,
            output_name=found.output_name,
            output=found.output,
            modules=found.modules,
            memory=self.memory(),
            seconds=Seconds(found.reference_seconds, found.candidate_seconds, found.reused),
            notices=(*self.model.notices, *found.notices),
            lost=self.lost_values(cancelled),
        )

    @_reading_weights
    def causes(
        self, on_progress: OnParts = lambda done, total: None, cancelled: IsCancelled = never
    ) -> AttributionReport:
        """Which modules the drift of the recipe in force arises in; see `causes`. Raises as `drift` does, and UserError."""
        causes = Causes(self.model, self._need_inputs(), self.settings, tuple(map(str, self.recipe.rules)))
        return causes.report(on_progress, cancelled)

    @_reading_weights
    def floor(self, on_progress: OnParts = lambda done, total: None, cancelled: IsCancelled = never) -> Floor:
        """The drift of the reference against itself, measured once for the inputs; see `floor`. Raises as `drift` does."""
        inputs = self._need_inputs()
        if self._floor is None or self._floor[0] is not inputs:
            self._floor = inputs, measure_floor(self.model, inputs, on_progress, cancelled)
        return self._floor[1]

    @_reading_weights
    def nonfinite(
        self, report: DriftReport, on_trial: OnParts = lambda done, total: None, cancelled: IsCancelled = never
    ) -> NonFiniteDiagnosis | None:
        """Where values stop being finite and what mends it, for a report of the recipe in force; None where all are finite.

        Raises as `drift` does; see `nonfinite.diagnose_nonfinite`.
        """
        output = report.output
        if self._meter is None or not (output.nonfinite or output.nonfinite_reference):
            return None
        bad = not output.nonfinite
        try:
            return diagnose_nonfinite(self._meter, self.tree, self.recipe, report.modules, bad, on_trial, cancelled)
        finally:
            self.model.apply(self._plan.dtypes)

    @_reading_weights
    def loss_remedy(
        self, report: DriftReport | None, on_trial: OnParts = lambda done, total: None, cancelled: IsCancelled = never
    ) -> LossRemedy | None:
        """The rules that keep the values which the recipe in force loses, tried out where there is a report of it; None where
        nothing is lost but by rounding. Raises Cancelled.
        """

        def count(name: str, dtype: str) -> ValueLoss | None:
            return self.model.weights[name].count_loss(dtype, cancelled)

        losses = self.lost_values(cancelled)
        if report is None or self._meter is None:
            reason = self.no_forward or "the recipe was not measured"
            return untried_remedy(self.tree, self._plan, losses, count, reason)
        try:
            return tried_remedy(self._meter, self.tree, self._plan, losses, report.output, count, on_trial, cancelled)
        finally:
            self.model.apply(self._plan.dtypes)

    @_reading_weights
    def flow(self, cancelled: IsCancelled = never) -> tuple[ImplicitCastStats, ...]:
        """Every implicit cast of one forward pass over the first input, summed by module and operation. Raises as `drift` does."""
        inputs = self._need_inputs()
        with ForwardRunner(self.model, self.settings, cancelled) as passes:
            return summed(passes.flow(inputs.batches[0]))

    @_reading_weights
    def generate(
        self,
        tokens: int = 32,
        on_tokens: OnTokens = lambda which, done, most: None,
        cancelled: IsCancelled = never,
    ) -> tuple[Generation, ...]:
        """Text or captions of reference and candidate, written greedily; see `generation.generate`."""
        inputs = self._need_inputs()
        with ForwardRunner(self.model, self.settings, cancelled) as passes:
            return generate(passes, inputs, tokens, on_tokens)

    @_reading_weights
    def speed(
        self,
        on_passes: OnPasses = lambda what, done, total: None,
        cancelled: IsCancelled = never,
        repeats: int = REPEATS,
    ) -> SpeedReport:
        """Time whole forward passes in the reference's dtype, as stored, and as cast; see `speed.measure_speed`."""
        inputs = self._need_inputs()
        with ForwardRunner(self.model, self.settings, cancelled, watch=False) as passes:
            rows, notices = measure_speed(passes, inputs, self._plan.dtypes, on_passes, repeats)
        return SpeedReport(
            model=self.model.title,
            device=str(self.model.device),
            threads=torch.get_num_threads(),
            rules=tuple(map(str, self.recipe.rules)),
            inputs=inputs.description,
            rows=rows,
            notices=notices,
        )

    def export(
        self,
        folder: str | Path,
        max_shard_size: int | str = "5GB",
        on_bytes: Callable[[int, int], None] = lambda done, total: None,
        cancelled: IsCancelled = never,
        force: bool = False,
    ) -> ExportReport:
        """Write a checkpoint in the dtypes of the recipe in force; see `export.export`."""
        from dtype_engine.runtime.export import export, of_live

        contents = of_live(self.model, self.recipe, self._plan.dtypes)
        return export(contents, Path(folder), max_shard_size, on_bytes, cancelled, force, self.lost_values(cancelled))

    @_reading_weights
    def scan(
        self,
        dtypes: Sequence[str] = DEFAULT_DTYPES,
        draws: int | None = None,
        exact: bool = False,
        save: Path | None = None,
        on_progress: OnScan = lambda what, done, total: None,
        on_estimate: OnEstimate = lambda report: None,
        cancelled: IsCancelled = never,
    ) -> ScanReport:
        """How much every weight matters in each of `dtypes`, everything else as in the reference.

        Estimated from `draws` backward passes a sequence; `exact` measures each alone. A scan that was cancelled goes on
        where it was when the same is asked for again; `save` names a file to keep it in, and to go on from. The recipe in
        force plays no part. Raises as `drift` does, and UserError for a saved scan that is of something else.
        """
        inputs = self._need_inputs()
        asked = tuple(dict.fromkeys(dtype_table.parse_target(dtype) for dtype in dtypes))
        if dtype_table.STORED in asked or not asked:
            raise UserError(f"a scan needs dtypes to cast to: {', '.join(dtype_table.TARGETS)}")
        settings = RunSettings(compute=self.settings.compute)
        if exact:
            try:
                self.scanned = exact_sensitivities(
                    self.model, inputs, asked, settings, on_progress, on_estimate, cancelled
                )
            finally:
                self.model.apply(self._plan.dtypes)
            return self.scanned
        known = self._scan
        if (
            known is None
            or known.inputs is not inputs
            or (known.dtypes, known.settings, known.draws, known.save) != (asked, settings, draws, save)
        ):
            known = self._scan = Scan(self.model, inputs, asked, settings, draws, save=save)
        self.scanned = known.run(on_progress, on_estimate, cancelled)
        return self.scanned

    def predict(self, recipe: Recipe | None = None) -> Prediction:
        """The drift of a recipe (by default the one in force) by the last scan: the sum of its weights' scores.

        Raises UserError when nothing was scanned, or not in a dtype of the recipe.
        """
        if self.scanned is None:
            raise UserError("nothing was scanned yet, so no drift can be predicted")
        plan = self._plan if recipe is None else make_plan(self.tree, recipe)
        return predict(self.tree, plan, self.scanned, self.scanned.scores())

    def front(self, constraints: Constraints | None = None) -> Front:
        """The Pareto front of bytes against predicted drift, by the last scan. Raises UserError."""
        if self.scanned is None:
            raise UserError("nothing was scanned yet, so there is nothing to search in")
        return Front(make_items(self.tree, self.scanned.scores(), constraints or Constraints()))

    def search(
        self,
        budget: int | None = None,
        max_drift: float | None = None,
        constraints: Constraints | None = None,
        measure: bool = False,
        cancelled: IsCancelled = never,
    ) -> SearchReport:
        """The recipe of the lowest predicted drift within `budget` bytes (of the whole model), or the smallest whose
        predicted drift is at most `max_drift`; by the last scan.

        measure: put it in force and measure it too. Raises UserError, and OutOfReach when nothing meets the limit.
        """
        if (budget is None) == (max_drift is None):
            raise UserError("a search needs either a budget in bytes or the most drift there may be")
        front = self.front(constraints)
        fixed = self.tree.stored_bytes - sum(
            self.tree.tensors[name].nbytes for item in front.items for name in item.weights
        )
        if budget is not None:
            found = front.within(budget - fixed)
            if found is None:
                raise OutOfReach(
                    f"nothing fits in {budget:,} bytes: the smallest is {front.points[0].bytes + fixed:,} bytes"
                )
        else:
            assert max_drift is not None
            found = front.reaching(max_drift)
            if found is None:
                raise OutOfReach(
                    f"nothing drifts by {max_drift:g} or less: the best is {front.points[-1].predicted:.3g} predicted"
                )
        recipe = compress(self.tree, found.dtypes)
        measured = None
        if measure:
            self.apply(recipe, cancelled=cancelled)
            measured = scalar_drift(self.drift(cancelled=cancelled).output)
        assert self.scanned is not None
        return SearchReport(
            model=self.model.title,
            unit=self.scanned.unit,
            rules=tuple(map(str, recipe.rules)),
            stored_bytes=self.tree.stored_bytes,
            planned_bytes=found.bytes + fixed,
            predicted=found.score,
            front=tuple(dataclasses.replace(point, bytes=point.bytes + fixed) for point in front.points),
            measured=measured,
            notices=self.model.notices,
            lost=self.lost_values(cancelled, make_plan(self.tree, recipe)),
        )

    @_reading_weights
    def use_inputs(self, options: Options, cancelled: IsCancelled = never) -> None:
        """Run on other inputs from now on: those of `options`, whose other fields do not matter here.

        They are tried with the reference: one call, of given tensors one of each shape. Raises UserError when they can't be
        made, do not fit the model or do not run, and Cancelled; everything is as it was then.
        """
        inputs = make_inputs(self.model, options)
        with ForwardRunner(self.model, self.settings, cancelled, watch=False) as passes:
            for tried in one_of_each_shape(inputs):
                passes.dry_run(tried)
        self.inputs, self.options, self.no_forward = inputs, options, None
        self._meter = self._scan = self.scanned = None

    @property
    def inputs_reading(self) -> InputsSummary | None:
        """What the model is run on, call by call; None where it can't be run."""
        return reading(self.inputs) if self.inputs is not None else None

    def _need_inputs(self) -> Inputs:
        if self.inputs is None:
            raise NoForward(self.no_forward or "the model can't be run")
        return self.inputs

    def memory(self) -> MemoryStats:
        """Memory now; `peak_rss_bytes` since the last measurement began."""
        process = memory.process_memory(self.model.files)
        reading = MemoryStats(
            stored_bytes=self._plan.stored_bytes,
            planned_bytes=self._plan.planned_bytes,
            resident_bytes=self.model.resident_bytes,
            resident_by_device=tuple(self.model.resident_by_device().items()),
            rss_bytes=process.rss,
            anonymous_bytes=process.anonymous,
            mapped_bytes=process.mapped,
            peak_rss_bytes=process.peak_rss,
        )
        if self.model.device.type != "cuda":
            return reading
        device = self.model.device
        return dataclasses.replace(
            reading,
            device_allocated_bytes=torch.cuda.memory_allocated(device),
            device_reserved_bytes=torch.cuda.memory_reserved(device),
            device_peak_bytes=torch.cuda.max_memory_allocated(device),
        )


def open_session(
    model: str | Source | nn.Module | None = None,
    options: Options | None = None,
    inputs: Any = None,
    say: Say = lambda step: None,
    refused: Callable[[str], None] | None = None,
) -> Session:
    """Open a model: a path, Hugging Face id, `file.py:Name` or `package.module:Name`; None for the demo; or a live
    module.

    A live `nn.Module` is taken over as it is: put in evaluation mode, and cast in place. `inputs` is what to run it
    on: a dict (keyword arguments), a tuple (positional ones), a tensor, or a list of these, one a call.
    Raises UserError, among them NoForward when there is no architecture to load the weights into. `refused`: hears of inputs in
    `options` that do not fit, and the session opens with the defaults instead.
    """
    options = options or Options()
    if options.threads:
        torch.set_num_threads(options.threads)
    given = from_values(inputs, "inputs") if inputs is not None else None
    if isinstance(model, nn.Module):
        device = next((tensor.device for tensor in model.parameters()), pick_device("cpu"))
        live = LiveModel.wrap(model, type(model).__name__, device)
        return Session(live, options, given)
    source = model if isinstance(model, Source) else locate(model)
    live = load(source, options, say)
    refuse_unreadable(live.identities)
    try:
        return Session(live, options, given)
    except UserError as error:
        if refused is None:
            raise
        refused(str(error))
        return Session(live, typed(options, ""), given)
