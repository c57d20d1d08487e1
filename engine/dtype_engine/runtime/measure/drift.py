"""Measuring drift: the reference and the candidate run over the inputs, a sequence at a time, and are compared."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward
from dtype_engine.core.memory_share import memory_budget
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.memory import MemoryStats
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.measure.modules.comparer import ModuleComparer
from dtype_engine.runtime.measure.modules.module_sums import ModuleSums
from dtype_engine.runtime.measure.modules.recorder import ModuleRecorder
from dtype_engine.runtime.measure.modules.routing import Routing, RoutingComparer
from dtype_engine.runtime.measure.plan import MeasurementPlan, Step
from dtype_engine.runtime.measure.progress import MeasurementProgress
from dtype_engine.runtime.measure.running_totals import ReferenceRecord, RunningTotals
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import reference_name
from dtype_engine.runtime.passes.class_dimensions import classes_dimension
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.kept_positions import KeptPositions
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.one_pass import PassOptions, PassResult
from dtype_engine.runtime.passes.output_cache import OutputCache
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

MOST_KEPT = 2 << 30
"""Bytes that are kept between measurements by default, at most: the outputs of some hundred tokens in a model of 1 B parameters."""

_WITH_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def budget_for(asked: int | None = None) -> int:
    """How many bytes may be kept between measurements: what was asked for, else a quarter of what is free, up to `MOST_KEPT`."""
    return min(MOST_KEPT, memory_budget()) if asked is None else asked


@dataclass
class DriftMeter:
    """Measures how far a candidate's outputs drift from the reference's over the inputs.

    The shortest sequence is run first, so that there is a figure soon, reference and candidate in turn. Which sequences follow, and
    in which of them modules are compared: `MeasurementPlan`.

    The reference's outputs, and those of the candidate that the next recipe may leave as they are, are kept between measurements
    within `budget` bytes. For the sequences that do not fit the reference runs again each time, right before the candidate, so
    nothing grows with the amount of calibration text.
    """

    model: LiveModel
    """The model whose weights as stored are the reference."""
    inputs: Inputs
    settings: RunSettings = field(default_factory=RunSettings)
    budget: int = field(default_factory=budget_for)
    working: int = field(default_factory=memory_budget)
    """The most bytes of one sequence's reference outputs while that sequence is compared."""
    reuse: bool = True
    """Whether outputs of the candidate's last pass take the place of what can't have changed since."""
    behavior: ModelBehavior = field(default_factory=ModelBehavior)
    """What is known of `model`."""
    candidate: LiveModel | None = None
    """The model that is compared, as it is cast now; None: `model` itself. Another one needs outputs of the same shape."""
    candidate_behavior: ModelBehavior = field(default_factory=ModelBehavior)
    """What is known of `candidate`, where that is another model."""
    _caches: dict[int, tuple[OutputCache, bool]] = field(default_factory=dict)
    """Of the candidate's last pass over each sequence, and whether modules were compared in it."""
    _records: dict[int, ReferenceRecord] = field(default_factory=dict)
    _calls: dict[bool, int] = field(default_factory=dict)
    """See `MeasurementProgress`."""
    _routing: Routing | None = field(init=False)
    _plan: MeasurementPlan = field(init=False)
    _modules: int = field(init=False)
    """How many the model has."""

    def __post_init__(self) -> None:
        self._plan = MeasurementPlan(self.inputs.batches)
        self._modules = sum(1 for _ in self.model.module.modules()) - 1
        self._routing = Routing.of(self.model)

    def measure(self, listener: MeasurementListener | None = None, cancelled: IsCancelled = never) -> RunningTotals:
        """Run what has to be run and compare: the last of `readings`, or the first that is as precise as the listener wants.

        cancelled: for callers without a listener. Raises NoForward, KernelError, Cancelled.
        """
        listener = MeasurementListener(cancelled=cancelled) if listener is None else listener
        totals: RunningTotals | None = None
        with closing(self.readings(listener)) as readings:
            for totals in readings:
                if listener.on_sequence is not None:
                    listener.on_sequence(totals)
                if (wanted := _precision(listener)) is not None:
                    extent = totals.extent
                    if not extent.whole and extent.is_within(wanted):
                        break
        if totals is None:
            raise NoForward("there are no inputs to run the model on")
        return totals

    @property
    def kept_bytes(self) -> int:
        """Bytes of the outputs that are kept for the next measurement. Safe to ask for from any thread."""
        kept = [record.nbytes for record in list(self._records.values())]
        return sum(kept) + sum(cache.nbytes for cache, _ in list(self._caches.values()))

    def report(
        self, totals: RunningTotals, recipe: Recipe, memory: MemoryStats, lost: tuple[ValueLoss, ...]
    ) -> DriftReport:
        """A measurement of the candidate under `recipe`, with what it ran on and in."""
        candidate, output = self.candidate or self.model, totals.output
        return DriftReport(
            model=candidate.title,
            device=str(candidate.device),
            reference=reference_name(self.model),
            rules=tuple(map(str, recipe.rules)),
            settings=str(self.settings),
            inputs=self.inputs.description,
            output_name=totals.output_name,
            output=output,
            modules=totals.modules,
            modules_sequences=totals.modules_sequences,
            memory=memory,
            seconds=totals.seconds,
            sequences=totals.extent,
            notices=(
                *candidate.notices,
                *totals.notices(output),
                *_fast_path_notices(self.model.module),
            ),
            lost=lost,
            activations=self.settings.quantize_activations,
            coverage=candidate.coverage,
        )

    def readings(self, listener: MeasurementListener) -> Generator[RunningTotals, None, None]:
        """Run the inputs one sequence at a time, and yield the totals after each, which are those of all at last.

        Raises NoForward, KernelError, Cancelled.
        """
        batches, totals = self.inputs.batches, None
        progress = MeasurementProgress(listener.on_progress, batches, self._calls, self._modules)
        with ExitStack() as stack:
            reference_runner, candidate_runner = self._runners(listener.cancelled, stack)
            for step in self._plan.steps(listener.all_modules or never):
                self._expect(progress, step, totals, listener)
                reference = self._reference(reference_runner, step, progress)
                if totals is None:
                    name, output = reference.output_name, reference.output
                    classes_dim = classes_dimension(self.model.module, name, output, self.settings.classes_dim)
                    totals = RunningTotals(name, output, classes_dim, len(batches), self._routing is not None)
                kept = KeptPositions.of(self.model.module, batches[step.number], self.model.device)
                comparer = self._comparer(step, reference, totals, listener, kept)
                progress.begin_pass("candidate", step.number, step.compares_modules, comparer)
                ran = self._candidate(candidate_runner, step, progress)
                output = _comparable_output(ran, reference)
                positions = None if kept is None else kept.of_main(reference.output_name, output)
                totals.add(step.number, batches[step.number], reference, ran, output, positions)
                if comparer is not None:
                    totals.set_modules(step.number, comparer.sums)
                    if listener.on_modules is not None:
                        listener.on_modules(totals.modules)
                yield totals

    def _runners(self, cancelled: IsCancelled, stack: ExitStack) -> tuple[ForwardRunner, ForwardRunner]:
        """What runs the reference and what runs the candidate, open as long as `stack` is; the same where they are one model."""
        reference = stack.enter_context(ForwardRunner(self.model, self.settings, cancelled, behavior=self.behavior))
        if self.candidate is None or self.candidate is self.model:
            return reference, reference
        behavior = self.candidate_behavior
        return reference, stack.enter_context(
            ForwardRunner(self.candidate, self.settings, cancelled, behavior=behavior)
        )

    def _expect(
        self, progress: MeasurementProgress, step: Step, totals: RunningTotals | None, listener: MeasurementListener
    ) -> None:
        """Tell the progress what is still to be run."""
        every = (listener.all_modules or never)()
        steps = {
            step.number: step.compares_modules,
            **{number: every or self._plan.compares(number) for number in step.left},
        }
        with_reference = [
            number for number, with_modules in steps.items() if not self._has_record(number, with_modules)
        ]
        rest = 1.0 if totals is None else totals.extent.rest_for(_precision(listener))
        progress.expect([*steps], with_reference, rest)

    def _comparer(
        self,
        step: Step,
        reference: ReferenceRecord,
        totals: RunningTotals,
        listener: MeasurementListener,
        kept: KeptPositions | None,
    ) -> ModuleComparer | None:
        """What compares modules in the candidate's pass; None where they are not compared."""
        if not step.compares_modules or reference.modules is None:
            return None
        routing = RoutingComparer(self._routing, reference.choices)
        if (on_modules := listener.on_modules) is None:
            return ModuleComparer(reference.modules, None, kept, routing)

        def report(sums: Mapping[str, ModuleSums]) -> None:
            on_modules(totals.modules_with(step.number, sums))

        return ModuleComparer(reference.modules, report, kept, routing)

    def _candidate(self, runner: ForwardRunner, step: Step, observer: ModuleObserver) -> PassResult[Any]:
        """Run the candidate on one sequence, what is unchanged since the last measurement left out, and keep its outputs."""
        earlier, compared = self._caches.pop(step.number, (None, False))
        options = PassOptions(
            watched=self._plan.watched(step),
            cache_bytes=max(0, self.budget - self.kept_bytes) if self.reuse else 0,
            cached=self._plan.cached,
            earlier=earlier if compared or not step.compares_modules else None,
        )
        ran = runner.candidate(runner.candidate_call(self.inputs.batches[step.number]), options, observer)
        if ran.cache is not None and ran.cache.calls:
            self._caches[step.number] = ran.cache, step.compares_modules
        return ran

    def _has_record(self, number: int, with_modules: bool) -> bool:
        """Whether what the reference gave for a sequence is there."""
        record = self._records.get(number)
        return record is not None and (record.modules is not None or not with_modules)

    def _reference(self, runner: ForwardRunner, step: Step, progress: MeasurementProgress) -> ReferenceRecord:
        """What the reference gives for one sequence: kept, or run now, and kept if that fits the budget."""
        if self._has_record(step.number, step.compares_modules):
            return self._records[step.number]
        main_alone = self._records.pop(step.number, None)
        left = self.budget - sum(record.nbytes for record in self._records.values())
        recorder = ModuleRecorder(max(left, self.working)) if step.compares_modules else None
        progress.begin_pass("reference", step.number, step.compares_modules, recorder)
        options = PassOptions(watched=self._plan.watched(step), learns=True)
        call = runner.reference_call(self.inputs.batches[step.number])
        ran = runner.reference(call, options, progress)
        name, output = main_output(ran.output)
        if recorder is None:
            record = ReferenceRecord(name, output.detach().clone(), ran.seconds, None)
        else:
            copied = recorder.copy_of(output)
            left_out = frozenset(recorder.left_out)
            record = ReferenceRecord(name, copied, ran.seconds, recorder.outputs, left_out, recorder.choices)
            main = [module for (module, _), kept in recorder.outputs.items() if kept is copied]
            self._plan.add_calls(ran.finished, ran.spans, main)
        if record.nbytes <= left:
            while self._caches and self.kept_bytes + record.nbytes > self.budget:
                self._caches.popitem()  # a candidate's outputs serve one recipe, a reference's all
            self._records[step.number] = record
        elif main_alone is not None:
            self._records[step.number] = main_alone
        return record


def _comparable_output(ran: PassResult[Any], reference: ReferenceRecord) -> torch.Tensor:
    """The main output of a candidate's pass. Raises NoForward where it is not of the reference's shape."""
    name, output = main_output(ran.output)
    if name != reference.output_name or output.shape != reference.output.shape:
        raise NoForward(
            f"the candidate's output ({name}, {tuple(output.shape)}) is not the reference's "
            f"({reference.output_name}, {tuple(reference.output.shape)}), so they can't be compared"
        )
    return output


def _precision(listener: MeasurementListener) -> float | None:
    """How precise the listener wants the figures to be now; None: all inputs are to be run."""
    return None if listener.precision is None else listener.precision()


def _fast_path_notices(module: nn.Module) -> tuple[str, ...]:
    """What is not as in a plain run: torch takes the fast paths of its own encoders only where no mode is on."""
    found = next((type(each).__name__ for each in module.modules() if isinstance(each, _WITH_FAST_PATH)), None)
    if found is None:
        return ()
    return (
        f"torch's fast path of {found} is off in reference and candidate: padded positions are computed like others",
    )
