"""Measures drift: runs the reference and the candidate over the inputs, one sequence at a time, and compares their outputs."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.dtypes import quantizes_activations
from dtype_engine.core.errors import NoForward
from dtype_engine.core.kv_formats import KV_FORMATS, WINDOW
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import plural
from dtype_engine.recipe import Recipe, llama_notices, make_plan
from dtype_engine.recipe.state_words import state_notices
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.memory import MemoryStats
from dtype_engine.runtime.device import cache_budget, enough_memory
from dtype_engine.runtime.execution.executor import Executor, for_states
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.embeddings import Embedding
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.measure.modules.comparer import ModuleComparer
from dtype_engine.runtime.measure.modules.module_sums import ModuleSums
from dtype_engine.runtime.measure.modules.recorder import ModuleRecorder
from dtype_engine.runtime.measure.modules.routing import Routing, RoutingComparer
from dtype_engine.runtime.measure.plan import MeasurementPlan, Step
from dtype_engine.runtime.measure.progress import MeasurementProgress
from dtype_engine.runtime.measure.running_totals import ReferenceRecord, RunningTotals
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.stored_tree import NOT_USED
from dtype_engine.runtime.modes.reference import reference_name
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics
from dtype_engine.runtime.numerics.compare.pictures import picture_range
from dtype_engine.runtime.passes.class_dimensions import classes_dimension
from dtype_engine.runtime.passes.kept_positions import KeptPositions
from dtype_engine.runtime.passes.model_behavior import ModelBehavior, Run
from dtype_engine.runtime.passes.one_pass import PassOptions, PassResult
from dtype_engine.runtime.passes.output_cache import OutputCache
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

MOST_KEPT = 2 << 30
"""Limit on the bytes of outputs kept between measurements: some hundred tokens of a model with 1 B parameters."""

MOST_UNSAVED = 8
"""The maximum number of sequences side by side if the measurement is saved. An interrupt loses the results of these."""
_BYTES_SIDE_BY_SIDE = 12
"""How many bytes each element of an output needs while sequences run side by side: float32 outputs, and temporary tensors."""
_WITH_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def budget_for(model: LiveModel, asked: int | None = None) -> int:
    """Return how many bytes of outputs to keep: `asked` or, if that is None, a quarter of the free memory, at most `MOST_KEPT`."""
    return min(MOST_KEPT, model.cache_budget) if asked is None else asked


@dataclass
class DriftMeter:
    """Measures how far the outputs of a candidate (the model under a recipe) drift from those of the reference over the inputs. For
    each sequence, in the order of a `MeasurementPlan`, the reference runs first and then the candidate.

    Up to `budget` bytes of outputs are kept between measurements: the reference's, and those of the candidate that the next recipe
    may leave unchanged. If the reference's outputs for a sequence do not fit, the reference runs again in each measurement, right
    before the candidate. Memory use therefore does not grow with the length of the calibration text.
    """

    model: LiveModel
    """The model whose stored weights the reference run uses."""
    inputs: Inputs
    settings: RunSettings = field(default_factory=RunSettings)
    budget: int = MOST_KEPT
    behavior: ModelBehavior = field(default_factory=ModelBehavior)
    """Facts about `model` that were observed during its passes, such as which modules have side effects."""
    base: Run = "reference"
    """The run that serves as the reference. With "candidate", only the execution of the two runs differs."""
    _caches: dict[int, tuple[OutputCache, bool]] = field(default_factory=dict)
    """By the index of a sequence: (outputs of the candidate's last pass over it, whether modules were compared in it)."""
    _settings_of_kept: RunSettings | None = None
    """The settings with which the passes ran whose outputs are kept."""
    _records: dict[int, ReferenceRecord] = field(default_factory=dict)
    _not_compared: set[str] = field(default_factory=set)
    """The names of the modules whose outputs the executions of the settings leave out."""
    _overflowing: set[str] = field(default_factory=set)
    """The names of the states of recurrent layers with values that became infinite in their format."""
    _calls: dict[bool, int] = field(default_factory=dict)
    """The number of module calls that a pass observes, by whether it observes all modules (True) or only some (False)."""

    def __post_init__(self) -> None:
        self._plan = MeasurementPlan(self.inputs.batches)
        self._modules = sum(1 for _ in self.model.module.modules()) - 1
        self._routing = Routing.of(self.model)
        self._working = cache_budget(self.model.device)
        """Maximum number of bytes of the reference's outputs to hold during a comparison, even if `budget` is smaller."""

    def measure(
        self,
        listener: MeasurementListener | None = None,
        cancelled: IsCancelled = never,
        begun: RunningTotals | None = None,
    ) -> RunningTotals:
        """Measure until all inputs have been run, or until the metrics are as precise as the listener requires. Returns the totals.

        listener: receives the progress; if None, nothing is reported. cancelled: ignored if a listener is given, which has its own.
        begun: the totals of an earlier measurement that was interrupted; only the sequences that these totals lack are run, and are
        added to them. Raises NoForward, KernelError, Cancelled.
        """
        listener = MeasurementListener(cancelled=cancelled) if listener is None else listener
        totals = begun
        with closing(self.readings(listener, begun)) as readings:
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
        """The number of bytes of outputs kept for the next measurement. Any thread may read it."""
        kept = [record.nbytes for record in list(self._records.values())]
        return sum(kept) + sum(cache.nbytes for cache, _ in list(self._caches.values()))

    def report(
        self, totals: RunningTotals, recipe: Recipe, memory: MemoryStats, lost: tuple[ValueLoss, ...] | None
    ) -> DriftReport:
        """Return a report of a measurement. totals: its results. recipe: the rules of the candidate. lost: for each weight, how
        many values its cast makes infinite or zero, or saturates; None if they were not counted.
        """
        model, output = self.model, totals.output
        plan = make_plan(model.tree, recipe)
        # Whether runtimes would quantize activations in the format that a rule gives to weights.
        quantizes_inputs = any(
            quantizes_activations(rule.dtype) and taken.tensors
            for rule, taken in zip(recipe.rules, plan.selections, strict=True)
        )
        return DriftReport(
            model=model.title,
            device=str(model.device),
            reference=reference_name(model),
            rules=tuple(map(str, recipe.rules)),
            settings=str(self._executed),
            inputs=self.inputs.description,
            output_name=totals.output_name,
            output=output,
            modules=totals.modules,
            modules_sequences=len(totals.modules_numbers),
            memory=memory,
            seconds=totals.seconds,
            sequences=totals.extent,
            notices=(
                *model.notices,
                *totals.notices(output),
                *_quantized_notices(model.tree, {name for taken in plan.selections for name in taken.uncastable}),
                *llama_notices(model.tree, plan),
                *_window_notices(model, self.inputs, totals.modules_numbers),
                *state_notices(model.tree, plan),
                *step_notices(model, self.inputs, totals.numbers, "reference and candidate"),
                *_query_notices(model),
                *_fast_path_notices(model.module),
                *_not_compared_notices(self._not_compared),
                *_overflow_notices(self._overflowing),
            ),
            lost=lost,
            weights_only=self.settings.quantize_activations == "none" and quantizes_inputs,
            coverage=model.coverage,
            pictures=totals.pictures,
        )

    @property
    def _executed(self) -> RunSettings:
        """The settings with which the passes run: token by token if states of recurrent layers have a format. The reference does so
        as well, so that only the rounding differs.
        """
        return for_states(self.model, self.settings)

    @property
    def routed(self) -> bool:
        """Whether the model routes tokens to experts."""
        return self._routing is not None

    def readings(
        self, listener: MeasurementListener, begun: RunningTotals | None = None
    ) -> Generator[RunningTotals, None, None]:
        """Run the inputs one sequence at a time. After each sequence, yield the totals over all sequences run until then. listener:
        receives the progress. begun: the totals of an interrupted measurement, to continue. Raises what `measure` raises.
        """
        batches, totals = self.inputs.batches, begun
        self._forget_other_settings()
        progress = MeasurementProgress(listener.on_progress, batches, self._calls, self._modules)
        running = ForwardRunner(self.model, self.settings, listener.cancelled, behavior=self.behavior)
        with closing(progress), running as runner, closing(Executor(runner, batches)) as executor:
            self._not_compared, self._overflowing = executor.not_compared, executor.overflowing
            runner.calibrate_caches(batches)
            steps_left = (
                step
                for step in self._plan.steps(listener.all_modules or never)
                if totals is None or not totals.has(step.number, step.compares_modules)
            )
            for steps in self._groups(steps_left, MOST_UNSAVED if listener.saves else None):
                self._expect(progress, steps, totals, listener)
                sharing = sum(step.compares_modules for step in steps)
                references = runner.side_by_side(
                    [partial(self._reference, executor, step, progress, sharing) for step in steps]
                )
                if totals is None:
                    totals = self._empty_totals(references[0])
                comparers = []
                for step, reference in zip(steps, references, strict=True):
                    batch, attended = batches[step.number], reference.attended
                    kept = KeptPositions.of(self.model.module, batch, self.model.device, attended)
                    comparers.append((kept, self._comparer(step, reference, totals, listener, kept)))
                passes = runner.side_by_side(
                    [
                        partial(self._candidate, executor, step, progress, comparer)
                        for step, (_, comparer) in zip(steps, comparers, strict=True)
                    ]
                )
                for step, reference, (kept, comparer), ran in zip(steps, references, comparers, passes, strict=True):
                    output = _comparable_output(ran, reference)
                    positions = None if kept is None else kept.of_main(reference.output_name, output)
                    with enough_memory("the figures of the output", self.model.device):
                        totals.add(step.number, batches[step.number], reference, ran, output, positions)
                    if comparer is not None:
                        totals.set_modules(step.number, comparer.sums)
                        if listener.on_modules is not None:
                            listener.on_modules(totals.modules)
                    yield totals

    def _empty_totals(self, reference: ReferenceRecord) -> RunningTotals:
        """Return totals without sequences. reference: the outputs of the first sequence that has run."""
        name, output, model = reference.output_name, reference.output, self.model
        classes_dim = classes_dimension(model.module, name, output, self.settings.classes_dim)
        comparison = OutputMetrics(classes_dim, picture_range(model.module), self.settings.acceptance)
        embedding = self.embedding(name, output.ndim)
        return RunningTotals(name, output, comparison, len(self.inputs.batches), self.routed, embedding)

    def embedding(self, name: str, dimensions: int) -> Embedding | None:
        """Return how the vectors of inputs are made, or None if the model makes none. name, dimensions: of the main output."""
        return Embedding.of(self.model, name, dimensions, self.inputs.batches[0])

    def _forget_other_settings(self) -> None:
        """Drop outputs that passes with other settings computed."""
        before, self._settings_of_kept = self._settings_of_kept, self._executed
        if before is not None and before != self._executed:
            self._caches.clear()
            if before.reference_execution != self._executed.reference_execution:
                self._records.clear()

    def _groups(self, steps: Iterable[Step], most: int | None) -> Iterator[list[Step]]:
        """Yield the steps in groups whose sequences run side by side. A group is a single step, or several if the model is larger
        than memory. The outputs of a group take at most `_working` bytes, as estimated from the largest dimension of a weight.
        most: the maximum number of steps in a group, or None if only the bytes limit it.
        """
        over_memory = self.model.memory.limited
        widest = max((dim for weight in self.model.weights.values() for dim in weight.info.shape), default=1)
        group, nbytes = list[Step](), 0
        for step in steps:
            size = self.inputs.batches[step.number].elements * widest * _BYTES_SIDE_BY_SIDE
            if group and (not over_memory or nbytes + size > self._working or len(group) == most):
                yield group
                group, nbytes = [], 0
            group.append(step)
            nbytes += size
        if group:
            yield group

    def _expect(
        self,
        progress: MeasurementProgress,
        group: Sequence[Step],
        totals: RunningTotals | None,
        listener: MeasurementListener,
    ) -> None:
        """Tell `progress` which sequences the reference and the candidate still have to run: `group` and all later ones."""
        every = (listener.all_modules or never)()
        steps = {step.number: step.compares_modules for step in group}
        added = () if totals is None else totals.numbers
        steps |= {number: every or self._plan.compares(number) for number in group[-1].left if number not in added}
        with_reference = [number for number, compares in steps.items() if not self._has_record(number, compares)]
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
        """Return the observer that compares modules in the candidate's pass, or None if they are not compared in this step's
        sequence. kept: the positions to compare. totals, listener: while the pass runs, `listener` receives the drift of modules
        over the sequences in `totals` and this one.
        """
        if not step.compares_modules or reference.modules is None:
            return None

        def report(sums: Mapping[str, ModuleSums]) -> None:
            if listener.on_modules is not None:
                listener.on_modules(totals.modules_with(step.number, sums))

        routing = RoutingComparer(self._routing, reference.choices)
        return ModuleComparer(reference.modules, routing, kept, report if listener.on_modules is not None else None)

    def _candidate(
        self, executor: Executor, step: Step, progress: MeasurementProgress, comparer: ModuleComparer | None
    ) -> PassResult[Any]:
        """Run the candidate on a step's sequence. Module outputs that can't have changed since the last measurement are reused."""
        observer = progress.begin_pass("candidate", step.number, step.compares_modules, comparer)
        earlier, compared = self._caches.pop(step.number, (None, False))
        options = PassOptions(
            watched=self._plan.watched(step),
            cache_bytes=max(0, self.budget - self.kept_bytes),
            cached=self._plan.cached,
            earlier=earlier if compared or not step.compares_modules else None,
        )
        ran = executor.run("candidate", self._executed.execution, step.number, options, observer)
        if ran.cache is not None and ran.cache.calls:
            self._caches[step.number] = ran.cache, step.compares_modules
        return ran

    def _has_record(self, number: int, with_modules: bool) -> bool:
        record = self._records.get(number)
        return record is not None and (record.modules is not None or not with_modules)

    def _reference(
        self, executor: Executor, step: Step, progress: MeasurementProgress, sharing: int
    ) -> ReferenceRecord:
        """Return the reference's outputs for a step's sequence. If they are not kept, run the reference, and keep its outputs if
        they fit. sharing: the number of sequences that run side by side and keep module outputs. The memory is divided among them.
        """
        if self._has_record(step.number, step.compares_modules):
            return self._records[step.number]
        main_alone = self._records.pop(step.number, None)
        left = self.budget - sum(record.nbytes for record in self._records.values())
        recorder = ModuleRecorder(max(left, self._working) // sharing) if step.compares_modules else None
        observer = progress.begin_pass("reference", step.number, step.compares_modules, recorder)
        options = PassOptions(watched=self._plan.watched(step), learns=True)
        ran = executor.run(self.base, self._executed.reference_execution, step.number, options, observer)
        name, output = main_output(ran.output)
        if recorder is None:
            record = ReferenceRecord(name, output.detach().clone(), ran.seconds, ran.attended, None)
        else:
            copied, modules = recorder.copy_of(output), recorder.outputs
            left_out = frozenset(recorder.left_out)
            record = ReferenceRecord(name, copied, ran.seconds, ran.attended, modules, left_out, recorder.choices)
            main = [module for (module, _), kept in modules.items() if kept is copied]
            self._plan.add_calls(ran.finished, ran.spans, main)
        if record.nbytes <= left:
            while self._caches and self.kept_bytes + record.nbytes > self.budget:
                self._caches.popitem()  # a candidate's outputs serve one recipe, the reference's serve all
            self._records[step.number] = record
        elif main_alone is not None:
            self._records[step.number] = main_alone
        return record


def step_notices(model: LiveModel, inputs: Inputs, numbers: Iterable[int], who: str) -> tuple[str, ...]:
    """Return a notice that says how many passes `who` ran, if states of recurrent layers have a format. numbers: the indexes of the
    sequences that have run.
    """
    if not model.state_formats:
        return ()
    tokens = sum(inputs.batches[number].kwargs["input_ids"].shape[-1] for number in numbers)
    return (
        f"recurrent states are rounded after each token, so {who} ran a pass for each of {plural(tokens, 'token')}",
    )


def _comparable_output(ran: PassResult[Any], reference: ReferenceRecord) -> torch.Tensor:
    """Return the main output of a candidate's pass. Raises NoForward if its name or shape is not that of the reference's output."""
    name, output = main_output(ran.output)
    if name != reference.output_name or output.shape != reference.output.shape:
        raise NoForward(
            f"the candidate's output ({name}, {tuple(output.shape)}) is not the reference's "
            f"({reference.output_name}, {tuple(reference.output.shape)}), so they can't be compared"
        )
    return output


def _precision(listener: MeasurementListener) -> float | None:
    return None if listener.precision is None else listener.precision()


def _fast_path_notices(module: nn.Module) -> tuple[str, ...]:
    """Return a notice if the model contains torch's own encoders, whose fast path is off while a mode intercepts calls."""
    found = next((type(each).__name__ for each in module.modules() if isinstance(each, _WITH_FAST_PATH)), None)
    if found is None:
        return ()
    return (
        f"torch's fast path of {found} is off for reference and candidate, so padded positions are computed like all "
        "others; the figures leave out those that a key_padding_mask of torch's self-attention marks",
    )


def _overflow_notices(states: Collection[str]) -> tuple[str, ...]:
    """Return a notice if values of recurrent states are too large for float16, which makes all later tokens infinite or NaN."""
    if not states:
        return ()
    first = printable(min(states))
    return (
        f"{plural(len(states), 'recurrent state')}, first {first}, had values beyond the largest of float16 (65,504), which became "
        "infinite: bfloat16 has them",
    )


def _not_compared_notices(modules: Collection[str]) -> tuple[str, ...]:
    if not modules:
        return ()
    first = printable(min(modules))
    return (
        f"{plural(len(modules), 'module')}, first {first}, can't be compared in this execution: no output for each token",
    )


def _window_notices(model: LiveModel, inputs: Inputs, compared: Collection[int]) -> tuple[str, ...]:
    """Return a notice if inputs are too short for KIVI to round anything, since it keeps a window of the newest tokens unrounded.
    The notice says whether all inputs are shorter than the window, or only those over which modules were compared. compared: the
    indexes of these inputs.
    """
    kivi = sorted({name for name in model.cache_formats.values() if KV_FORMATS[name].scales == "kivi"})
    ids = (batch.kwargs.get("input_ids") for batch in inputs.batches)
    lengths = [each.shape[-1] if isinstance(each, torch.Tensor) else 0 for each in ids]
    if not kivi or not any(lengths):
        return ()
    keeps = f"{kivi[0]} keeps up to {WINDOW} of the newest tokens unrounded"
    if max(lengths) < WINDOW:
        return (f"{keeps}, and all inputs are shorter: use longer texts",)
    if compared and max(lengths[number] for number in compared) < WINDOW:
        return (f"{keeps}, and modules were compared over shorter inputs: compare them over all (modules: exact)",)
    return ()


def _query_notices(model: LiveModel) -> tuple[str, ...]:
    """Return a notice if the values of a layer have a format that also rounds queries, but its keys have not."""
    rounding = {name for name, form in model.cache_formats.items() if KV_FORMATS[form].queries}
    without = [
        name for keys, *rest in model.cache_names.values() if keys not in rounding for name in rest if name in rounding
    ]
    if not without:
        return ()
    form = model.cache_formats[without[0]]
    return (f"{printable(without[0])} is {form}, but queries are only rounded where the keys are {form}, too",)


def _quantized_notices(tree: Tree, matched: Collection[str]) -> tuple[str, ...]:
    """Return a notice if rules match weights that another program has quantized. No rule casts such weights, so they stay as
    stored. matched: the names of the tensors that rules match but can't cast.
    """
    left = [
        tensor
        for name, tensor in tree.tensors.items()
        if name in matched and not (tensor.uncastable_reason or NOT_USED).startswith(NOT_USED)
    ]
    if not left:
        return ()
    modules = plural(len({tensor.name.rpartition(".")[0] for tensor in left}), "module")
    first = f"first {printable(left[0].name)}: {left[0].why_not_cast}"
    return (f"the rules match quantized weights of {modules}, which no rule casts: they stay as stored ({first})",)
