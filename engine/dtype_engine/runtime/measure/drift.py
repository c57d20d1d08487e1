"""Measuring drift: the reference and the candidate run over the inputs, a sequence at a time, and are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward
from dtype_engine.core.memory_share import memory_budget
from dtype_engine.core.options import RunSettings
from dtype_engine.core.throttle import Throttle
from dtype_engine.recipe import Recipe
from dtype_engine.results.drift import DriftReport, Extent, Seconds
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.memory import MemoryStats
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.inputs.preprocessing import text_config
from dtype_engine.runtime.measure.modules.comparison import OnModules, OutputComparer, OutputRecorder
from dtype_engine.runtime.measure.modules.module_rows import rows_each
from dtype_engine.runtime.measure.modules.module_sample import ModuleSample, compared_sequences
from dtype_engine.runtime.measure.modules.module_totals import module_drifts
from dtype_engine.runtime.measure.running_totals import Measurement, Reading, ReferenceRecord
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import reference_name
from dtype_engine.runtime.passes.output_cache import ForwardTrace
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import CandidateRun, ForwardRunner, RunAgain

OnProgress = Callable[[str, int, int], None]
OnReading = Callable[[Reading], None]
Enough = Callable[[Extent], bool]
Rest = Callable[[Extent], float]
Precision = Callable[[], float | None]
InFull = Callable[[], bool]
WHOLE_SHARE = 50
"""A module with at most this share (1/50) of a pass's calls is run whole or not at all."""
MOST_KEPT = 2 << 30
"""Bytes that are kept between measurements by default, at most: the outputs of some hundred tokens in a model of 1 B parameters."""


def all_of_it(extent: Extent) -> float:
    """What is left is run to the end."""
    return 1.0


def budget_for(asked: int | None = None) -> int:
    """How many bytes may be kept between measurements: what was asked for, else a quarter of what is free, up to `MOST_KEPT`."""
    return min(MOST_KEPT, memory_budget()) if asked is None else asked


@dataclass
class DriftMeter:
    """Measures drift of a live model over its inputs.

    The shortest sequence is run first, so that there is a figure soon, reference and candidate in turn (`running_order`).

    The reference's outputs, and those of the candidate that the next recipe may leave as they are, are kept between measurements
    within `budget` bytes. For the sequences that do not fit the reference runs again each time, right before the candidate, so
    nothing grows with the amount of calibration text. working: the most bytes of one sequence's reference outputs.
    """

    model: LiveModel
    inputs: Inputs
    settings: RunSettings = field(default_factory=RunSettings)
    budget: int = field(default_factory=budget_for)
    working: int = field(default_factory=memory_budget)
    reuse: bool = True
    _first_use: dict[int, dict[str, int]] = field(default_factory=dict)
    _traces: dict[int, tuple[ForwardTrace, bool]] = field(default_factory=dict)
    """Of each sequence, and whether its modules were compared in full."""
    _records: dict[int, ReferenceRecord] = field(default_factory=dict)
    _calls: dict[tuple[int, bool], int] = field(default_factory=dict)
    """Of a pass over each sequence, with all modules watched or those that have to be."""
    _left_wide: set[str] = field(default_factory=set)
    _written: set[str] = field(default_factory=set)
    """Modules whose outputs are written to after they returned."""
    _routed: bool = field(init=False)
    _sample: ModuleSample = field(init=False)
    _modules: int = field(init=False)
    """How many the model has."""

    def __post_init__(self) -> None:
        batches, modules = self.inputs.batches, [name for name, _ in self.model.module.named_modules() if name]
        elements = [batch.elements for batch in batches]
        every = frozenset(range(len(batches)))
        self._routed = _routes_tokens(self.model)
        order = running_order(batches)
        chosen = every if self._routed else compared_sequences(order, elements)
        self._sample = ModuleSample(chosen, order[0] if order else 0, modules)
        self._modules = len(modules)

    def measure(
        self,
        on_progress: OnProgress = lambda run, done, total: None,
        on_modules: OnModules = ignore,
        cancelled: IsCancelled = never,
        on_reading: OnReading = lambda reading: None,
        enough: Enough = lambda extent: False,
        modules_in_full: InFull = never,
        rest: Rest = all_of_it,
    ) -> Measurement:
        """Run what has to be run and compare: the last of `readings`, or the first that is `enough`. `on_reading` has each of
        them. Raises as `readings` does.
        """
        last: Reading | None = None
        with closing(self.readings(on_progress, on_modules, cancelled, modules_in_full, rest)) as readings:
            for last in readings:
                on_reading(last)
                extent = last.extent()
                if last.has_modules and not extent.whole and enough(extent):
                    break
        if last is None:
            raise NoForward("there are no inputs to run the model on")
        return last.measurement()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the outputs that are kept for the next measurement. Safe to ask for from any thread."""
        kept = [record.nbytes for record in list(self._records.values())]
        return sum(kept) + sum(trace.nbytes for trace, _ in list(self._traces.values()))

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
            sequences=measurement.extent,
            notices=(*self.model.notices, *measurement.notices, *self._of_activations(), *self._of_overwritten()),
            lost=lost,
            activations=self.settings.quantize_activations,
        )

    def _of_activations(self) -> tuple[str, ...]:
        """What the setting `quantize_activations` left out."""
        if not self._left_wide or self.settings.quantize_activations == "none":
            return ()
        names = ", ".join(sorted(self._left_wide))
        return (f"inputs of {names} are not quantised: runtimes quantise those of matrix products alone",)

    def _of_overwritten(self) -> tuple[str, ...]:
        """That passes do not begin alike."""
        told = []
        for verb, names in (("writes to", self.model.overwritten), ("keeps tensors in", self.model.going_on)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                told.append(
                    f"the model {verb} {names[0]}{more} while it runs: each pass begins with what the last one left"
                )
        return tuple(told)

    def readings(
        self,
        on_progress: OnProgress = lambda run, done, total: None,
        on_modules: OnModules = ignore,
        cancelled: IsCancelled = never,
        modules_in_full: InFull = never,
        rest: Rest = all_of_it,
    ) -> Generator[Reading, None, None]:
        """Run the inputs one sequence at a time; a reading after each, the last of all of them.

        `on_progress("reference" | "candidate", done, total)` counts elements of the inputs over all passes that are to be run;
        `on_modules(modules)` has the modules whose figures changed. Both at most ten times a second within a pass.
        `modules_in_full()` is asked before each pass and after the last: whether every row of the modules' outputs is compared in
        every sequence, instead of a sample; sequences whose were not are then run again. So is the first where it alone called a
        module. `rest(extent)`: which share of the sequences that are left will be run, as far as can be guessed.
        Raises NoForward, KernelError, Cancelled.
        """
        batches = self.inputs.batches
        with ForwardRunner(self.model, self.settings, cancelled) as runner:
            runner.first_use = self._first_use
            runner.left_wide = self._left_wide = set()
            reading: Reading | None = None
            progress = _Progress(on_progress, batches, self._calls, self._modules)
            waiting, sampled = running_order(batches), list[int]()
            while waiting:
                number, in_full = waiting.pop(0), modules_in_full()
                batch, again = batches[number], reading is not None and number in reading.numbers
                record = self._records.get(number)
                progress.expect(
                    [number, *waiting], self._recorded(in_full), 1.0 if reading is None else rest(reading.extent())
                )
                if record is None or (in_full and not record.in_full):
                    record = self._reference(runner, number, progress, in_full)
                if not set(waiting) - self._recorded(in_full):
                    runner.widened.clear()
                before = {} if reading is None or again else reading.modules
                left = (len(batches) if reading is None else reading.left) - (record.compared and not again)
                runner.watched, runner.kept = self._sample.watched_in(number), self._sample.kept
                if record.compared:
                    runner.watched = None
                progress.begin("candidate", number, runner.watched is None)
                comparer = OutputComparer(
                    record.modules, before, progress, on_modules, left, record.compared, self._routed
                )
                ran = self._candidate(runner, number, comparer, record)
                name, candidate = main_output(ran.output)
                if name != record.output_name or candidate.shape != record.output.shape:
                    raise NoForward(
                        f"the candidate's output ({name}, {tuple(candidate.shape)}) is not the reference's "
                        f"({record.output_name}, {tuple(record.output.shape)}), so they can't be compared"
                    )
                if reading is None:
                    reading = Reading(name, candidate, len(batches), self._routed)
                if not again:
                    reading.add(number, batch, record, ran, candidate)
                comparer.finish(candidate, reading.sums_of(number))
                reading.set_modules(number, comparer.sums, record.compared)
                if not record.compared or (
                    not record.in_full and any(sums.variance for sums in comparer.sums.values())
                ):
                    sampled.append(number)
                if not waiting and modules_in_full():
                    waiting, sampled = sampled, []
                elif not waiting and not in_full and self._sample.called_by_the_first_alone():
                    waiting = [self._sample.first]
                    sampled = [other for other in sampled if other != self._sample.first]
                    for kept in (self._records, self._traces):
                        kept.pop(self._sample.first, None)  # they lack these modules
                if on_modules is not ignore:
                    on_modules(module_drifts(reading.modules, reading.left, self._routed))
                yield reading
                if number in self._traces:
                    runner.settle_kind(batch, ran)

    def _candidate(
        self, runner: ForwardRunner, number: int, comparer: OutputComparer, record: ReferenceRecord
    ) -> CandidateRun:
        """Run the candidate on one batch, what is unchanged since the last measurement left out, and keep its trace."""
        earlier, compared_in_full = self._traces.pop(number, (None, False))
        if not self.reuse or (record.in_full and not compared_in_full):
            earlier = None
        batch, left = self.inputs.batches[number], self.budget - self.kept_bytes
        while True:
            try:
                ran = runner.candidate(batch, comparer, left, earlier, max(self._calls.values()) // WHOLE_SHARE)
                break
            except RunAgain:
                earlier = None
                comparer.restart()
        if self.reuse and ran.trace.calls:
            self._traces[number] = ran.trace, record.in_full
        return ran

    def _reference(self, runner: ForwardRunner, number: int, progress: _Progress, in_full: bool) -> ReferenceRecord:
        """Run the reference on one batch and keep what it gave if that fits the budget; a sample that is kept stays."""
        left = self.budget - sum(record.nbytes for record in self._records.values())
        rows = rows_each(len(self._sample.compared), len(self.inputs.batches))
        wanted = None if in_full else self._sample.compared_in(number)
        runner.watched = None if in_full else self._sample.watched_in(number)
        while True:
            progress.begin("reference", number, runner.watched is None)
            recorder = OutputRecorder(max(left, self.working), self._written, progress, in_full, rows, wanted)
            try:
                output, seconds = runner.reference(self.inputs.batches[number], recorder)
            except RunAgain:
                continue
            name, tensor = main_output(output)
            if recorder.finish(tensor):
                break
        if runner.watched is None:
            self._sample.note(number, runner.finished, runner.spans, recorder.main)
        kept = recorder.copy_of(tensor)
        own = kept if kept is not None else tensor.detach().clone()
        record = ReferenceRecord(
            name, own, recorder.kept, recorder.left_out, seconds, recorder.calls, in_full, wanted is None
        )
        self._calls[number, runner.watched is None] = recorder.calls
        if record.nbytes <= left and number not in self._records:
            while self._traces and self.kept_bytes + record.nbytes > self.budget:
                self._traces.popitem()  # a candidate's outputs serve one recipe, a reference's all
            self._records[number] = record
        return record

    def _recorded(self, in_full: bool) -> set[int]:
        """The batches whose reference need not run."""
        return {number for number, record in self._records.items() if record.in_full or not in_full}


class _Progress:
    """Called with the module calls of the pass under way, tells how much of all passes is done: of each, its input's elements.
    Where passes are short, so does the beginning of one in a tenth of a second.

    calls: of a pass over a batch, with all modules watched or not, where that is known by now. modules: how many the model has, the
    best guess before any pass.
    """

    def __init__(
        self, on_progress: OnProgress, batches: tuple[Batch, ...], calls: dict[tuple[int, bool], int], modules: int
    ) -> None:
        self._on_progress = on_progress
        self._sizes = [batch.elements for batch in batches]
        self._calls = calls
        self._modules = modules
        self._total = 0
        self._run, self._number, self._all = "", 0, True
        self._done = 0
        self._throttle = Throttle()

    def expect(self, numbers: Sequence[int], recorded: set[int], rest: float) -> None:
        """The batches that are still to be run, the next one first, and those of which the reference need not. rest: the share of
        these that will be, by a guess: a larger one than before counts where there is more to do than was told.
        """
        self._end()
        left = [self._sizes[number] * (1 if number in recorded else 2) for number in numbers]
        total = self._done + max(left[0], int(rest * sum(left)))
        self._total = max(self._done + left[0], min(total, self._total)) if rest < 1 and self._total else total

    def begin(self, run: str, number: int, every: bool) -> None:
        """A pass over a batch begins; the one before has ended, unless it is the same once more. every: it watches all modules."""
        if (self._run, self._number) != (run, number):
            self._end()
        self._run, self._number, self._all = run, number, every
        if self._throttle.due():  # a pass may end before its observer has anything to tell
            self._on_progress(run, self._done, self._total)

    def _end(self) -> None:
        if self._run:
            self._done += self._sizes[self._number]
        self._run = ""

    def __call__(self, calls: int) -> None:
        expected = self._calls.get((self._number, self._all)) or max(self._calls.values(), default=self._modules)
        share = min(1.0, calls / max(1, expected))
        self._on_progress(self._run, self._done + int(share * self._sizes[self._number]), self._total)


def running_order(batches: Sequence[Batch]) -> list[int]:
    """The numbers of the batches in the order in which they are run: the shortest, then the others spread over the whole, since
    the parts of one text that follow each other are alike.
    """
    count = len(batches)
    numbers = range(count)
    shortest = min(numbers, key=lambda number: batches[number].elements, default=0)
    golden = round(0.618 * count)
    step = next((step for step in range(max(1, golden), count) if math.gcd(step, count) == 1), 1)
    return sorted((turn * step % count for turn in numbers), key=lambda number: number != shortest)


def _routes_tokens(model: LiveModel) -> bool:
    """Whether the model's configuration speaks of several experts."""
    config = getattr(model.module, "config", None)
    described = text_config(config).to_dict() if hasattr(config, "to_dict") else {}
    return any("experts" in name and type(value) is int and value > 1 for name, value in described.items())
