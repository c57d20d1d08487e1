"""Measuring drift: the reference and the candidate run over the inputs, a sequence at a time, and are compared."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial

import torch

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward
from dtype_engine.core.memory_share import memory_budget
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.results.drift import DriftReport, ModuleDrift, OutputDrift, Seconds
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.memory import MemoryStats
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.measure.comparison import (
    KeptOutput,
    ModuleSums,
    OnModules,
    OutputComparer,
    OutputRecorder,
    is_distribution,
    module_drifts,
)
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import reference_name
from dtype_engine.runtime.numerics.metrics import OutputComparison
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import CandidateRun, ForwardRunner, RetryUnderRules
from dtype_engine.runtime.passes.trace import ForwardTrace

OnProgress = Callable[[str, int, int | None], None]
WHOLE_SHARE = 50
"""A module with at most this share (1/50) of a pass's calls is run whole or not at all."""


@dataclass(slots=True)
class _Record:
    """What the reference gave for one batch. Module outputs by (name, call), each with its energy Σr²."""

    output_name: str
    output: torch.Tensor
    modules: dict[tuple[str, int], KeptOutput]
    left_out: set[str]
    seconds: float
    calls: int

    @property
    def nbytes(self) -> int:
        held = {tensor.data_ptr(): tensor.nbytes for tensor, _ in self.modules.values()}
        return sum({**held, self.output.data_ptr(): self.output.nbytes}.values())


@dataclass(slots=True)
class Measurement:
    """What a measurement gave, over all inputs or those that were run so far.

    modules: in the order in which they were first called. Seconds are of all passes; `reused`: outputs of an earlier pass stood
    in for some calls. dimensions: of the main output: 3 for a distribution at every token, 2 for one an example.
    """

    output_name: str
    output: OutputDrift
    modules: tuple[ModuleDrift, ...]
    reference_seconds: float
    candidate_seconds: float
    reused: bool
    notices: tuple[str, ...] = ()
    dimensions: int = 0


@dataclass(slots=True)
class Reading:
    """What the sequences that were run so far gave. It grows with the next one: take its `measurement` before that.

    The figures are worked out when they are asked for, since percentiles need every position sorted.
    """

    output_name: str
    comparison: OutputComparison
    modules: dict[str, ModuleSums] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    reference_seconds: float = 0.0
    candidate_seconds: float = 0.0
    reused: bool = False
    dimensions: int = 0
    sequences: int = 0

    def measurement(self) -> Measurement:
        """The figures over the sequences so far."""
        notices = []
        if self.left_out:
            notices.append(
                f"{len(self.left_out)} modules are not compared: the reference's outputs do not fit the memory budget"
            )
        return Measurement(
            self.output_name,
            self.comparison.result(),
            module_drifts(self.modules),
            self.reference_seconds,
            self.candidate_seconds,
            self.reused,
            tuple(notices),
            self.dimensions,
        )


@dataclass
class DriftMeter:
    """Measures drift of a live model over its inputs.

    The reference's outputs are kept between measurements within `budget` bytes (by default a quarter of the memory
    that was free when it was made). For the batches that do not fit the reference runs again each time, right before
    the candidate, so nothing grows with the amount of calibration text.
    """

    model: LiveModel
    inputs: Inputs
    settings: RunSettings = field(default_factory=RunSettings)
    budget: int = field(default_factory=memory_budget)
    reuse: bool = True
    _first_use: dict[str, int] = field(default_factory=dict)
    _traces: dict[int, ForwardTrace] = field(default_factory=dict)
    _records: dict[int, _Record] = field(default_factory=dict)
    _calls: dict[int, int] = field(default_factory=dict)

    def measure(
        self,
        on_progress: OnProgress = lambda run, done, total: None,
        on_modules: OnModules = lambda modules: None,
        cancelled: IsCancelled = never,
    ) -> Measurement:
        """Run what has to be run and compare: the last of `readings`. Raises as that does."""
        last: Reading | None = None
        for reading in self.readings(on_progress, on_modules, cancelled):
            last = reading
        if last is None:
            raise NoForward("there are no inputs to run the model on")
        return last.measurement()

    def report(
        self, measurement: Measurement, recipe: Recipe, memory: MemoryStats, lost: tuple[ValueLoss, ...]
    ) -> DriftReport:
        """A measurement of the model under `recipe`, with what it ran on and in."""
        return DriftReport(
            model=self.model.title,
            device=str(self.model.device),
            reference=reference_name(self.model),
            rules=tuple(map(str, recipe.rules)),
            settings=str(self.settings),
            inputs=self.inputs.description,
            output_name=measurement.output_name,
            output=measurement.output,
            modules=measurement.modules,
            memory=memory,
            seconds=Seconds(measurement.reference_seconds, measurement.candidate_seconds, measurement.reused),
            notices=(*self.model.notices, *measurement.notices),
            lost=lost,
        )

    def readings(
        self,
        on_progress: OnProgress = lambda run, done, total: None,
        on_modules: OnModules = lambda modules: None,
        cancelled: IsCancelled = never,
    ) -> Generator[Reading, None, None]:
        """Run the inputs one sequence at a time; a reading after each, the last of all of them.

        `on_progress("reference" | "candidate", done, total)` counts module calls, `total` None while unknown;
        `on_modules(modules)` has the modules whose figures changed. Both at most ten times a second within a pass.
        Raises NoForward, KernelError, Cancelled.
        """
        with ForwardRunner(self.model, self.settings, cancelled) as runner:
            runner.first_use = self._first_use
            reading: Reading | None = None
            done = 0
            for index, batch in enumerate(self.inputs.batches):
                record = self._records.get(index) or self._reference(runner, index, batch, on_progress)
                before = {} if reading is None else reading.modules
                progress = partial(self._report_progress, on_progress, done)
                comparer = OutputComparer(record.modules, before, progress, on_modules)
                ran = self._candidate(runner, index, batch, comparer, record.calls // WHOLE_SHARE)
                done += record.calls
                name, candidate = main_output(ran.output)
                if name != record.output_name or candidate.shape != record.output.shape:
                    raise NoForward(
                        f"the candidate's output ({name}, {tuple(candidate.shape)}) is not the reference's "
                        f"({record.output_name}, {tuple(record.output.shape)}), so they can't be compared"
                    )
                if reading is None:
                    reading = Reading(name, OutputComparison(is_distribution(name, candidate)))
                reading.comparison.add(record.output, candidate, batch.next_tokens)
                for module, sums in comparer.sums.items():
                    reading.modules.setdefault(module, ModuleSums()).add(sums)
                reading.output_name = name
                reading.left_out |= record.left_out
                reading.reference_seconds += record.seconds
                reading.candidate_seconds += ran.seconds
                reading.reused = reading.reused or ran.reused
                reading.dimensions = candidate.ndim
                reading.sequences += 1
                on_modules(module_drifts(reading.modules))
                yield reading

    def _candidate(
        self, runner: ForwardRunner, index: int, batch: Batch, comparer: OutputComparer, whole: int
    ) -> CandidateRun:
        """Run the candidate on one batch, what is unchanged since the last measurement left out, and keep its trace."""
        earlier = self._traces.pop(index, None)
        kept = sum(record.nbytes for record in self._records.values()) + sum(
            trace.nbytes for trace in self._traces.values()
        )
        while True:
            try:
                ran = runner.candidate(batch, comparer, self.budget - kept, earlier if self.reuse else None, whole)
                break
            except RetryUnderRules:
                comparer.restart()
        if self.reuse and ran.trace.calls:
            self._traces[index] = ran.trace
        return ran

    def _report_progress(self, on_progress: OnProgress, before: int, calls: int) -> None:
        on_progress("candidate", before + calls, self._total_calls())

    def _total_calls(self) -> int | None:
        """Module calls of one pass over all inputs, once every batch was run."""
        return sum(self._calls.values()) if len(self._calls) == len(self.inputs.batches) else None

    def _reference(self, runner: ForwardRunner, index: int, batch: Batch, on_progress: OnProgress) -> _Record:
        """Run the reference on one batch and keep what it gave if that fits the budget."""
        budget = self.budget - sum(record.nbytes for record in self._records.values())
        before = sum(calls for known, calls in self._calls.items() if known < index)
        while True:
            recorder = OutputRecorder(
                max(budget, self.budget // 4),
                lambda calls: on_progress("reference", before + calls, self._total_calls()),
            )
            try:
                output, seconds = runner.reference(batch, recorder)
                break
            except RetryUnderRules:
                continue
        name, tensor = main_output(output)
        kept = recorder.copy_of(tensor)
        own = kept if kept is not None else tensor.detach().clone()
        record = _Record(name, own, recorder.kept, recorder.left_out, seconds, recorder.calls)
        self._calls[index] = recorder.calls
        if record.nbytes <= budget:
            self._records[index] = record
        return record
