"""Attributes the drift of a recipe to parts of the model: in each pass, one part uses its cast weights, and all other parts run as
in the reference run.

A part is a module that itself runs operations which use weights (a Linear, a norm, an embedding). If there are too many such
modules to run each, a part is a subtree. The drift of a part is measured at the model's main output. The local error of a part is
measured in the same pass at the part's own output; its inputs are those of the reference run.

The drifts of the parts need not add up to the drift of the recipe, and operations without weights (sums, activations) belong to no
part. Reports therefore show both the sum over the parts and the whole drift.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.dtypes import quantizes_activations
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.kv_cache import STATES as KEPT
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.results.attribution import AttributionReport, Contribution, PartialAttribution
from dtype_engine.results.drift import unit_for
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.measure.modules.module_sums import ModuleSums, compare_outputs
from dtype_engine.runtime.measure.modules.recorder import ModuleRecorder
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import equals_reference
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics, sqnr_db
from dtype_engine.runtime.passes.class_dimensions import classes_dimension
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.kept_positions import KeptPositions
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.one_pass import PassOptions
from dtype_engine.runtime.passes.output_cache import OutputCache
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.passes.stepwise import STATES, stepwise
from dtype_engine.search.sensitivity import scalar_drift

MOST_PASSES = 160
"""Maximum number of passes per batch. In a model with more modules, subtrees are measured first, and then only the children of the
subtrees that cause the most drift.
"""
ENOUGH_POSITIONS = 256
"""The attribution runs over as many batches as it needs to compare this many output rows, such as tokens."""
_BUDGET = 1 << 30
"""Maximum number of bytes of the reference run's outputs to keep: half for reuse in later passes, and half for comparison."""
_SIDE_BY_SIDE = 32
"""If the model is larger than memory, how many passes run side by side, so that each weight is read once for all of them."""

OnProgress = Callable[[int, int], None]
OnCauses = Callable[[PartialAttribution], None]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the model whose contribution to the drift is measured: a single module, or a subtree."""

    name: str
    """The name of the module, or of the root of the subtree."""
    modules: tuple[str, ...]
    """The modules in the part that themselves run operations with weights, such as `layers.0.mlp.up_proj` for `layers.0.mlp`."""


@dataclass(frozen=True, slots=True)
class PartDrift:
    """The measured drift of a `Part`."""

    drift: float
    """How far the part's casts alone make the main output drift, in the unit of the attribution report, such as nats per token."""
    local_sqnr_db: float | None
    """The SQNR of the module's own output in dB, or None if it is unknown."""


MeasureParts = Callable[[Sequence[Part]], Iterator[tuple[int, PartDrift]]]
"""A function that measures the given parts in any order, and yields (the part's index in the argument, its result) for each."""
_OnPart = Callable[[Iterable[Contribution], int, int], None]
"""A callback `(contributions found so far, number of finished measurements, number of all measurements)`."""


@dataclass(slots=True)
class _Base:
    """What the reference run produced for one batch."""

    batch: Batch
    output: torch.Tensor
    """The main output."""
    modules: dict[tuple[str, int], torch.Tensor]
    """The outputs of modules by (module, number of its call), for comparison with the outputs of later passes."""
    cache: OutputCache | None
    """The outputs of modules that later passes may reuse."""
    uses: Mapping[str, int]
    """By module, how many module calls had ended before the module first used a weight whose cast changes results. A pass that
    casts only this module can reuse the outputs of these calls.
    """
    masks: KeptPositions | None

    @property
    def nbytes(self) -> int:
        cached = self.cache.nbytes if self.cache is not None else 0
        return cached + sum({id(each): each.nbytes for each in self.modules.values()}.values())


@dataclass
class Attribution:
    """Finds how much of the drift of the currently cast model each of its modules causes."""

    model: LiveModel
    inputs: Inputs
    settings: RunSettings
    rules: tuple[str, ...] = ()
    behavior: ModelBehavior = field(default_factory=ModelBehavior)
    """Facts about the model that were observed during its passes, such as which modules have side effects."""
    known: dict[Part, PartDrift] = field(default_factory=dict)
    """The measurements of an earlier, cancelled `report` of the same casts, settings and inputs. The next one reuses them."""
    _bases: list[_Base] = field(default_factory=list)
    _stepped: list[_Base] = field(default_factory=list)
    """What the reference run produced token by token, for parts with states of recurrent layers, if these have formats."""
    _passes: int = 0
    _done: int = 0

    def __repr__(self) -> str:
        return f"Attribution: {printable(self.model.title)}, {len(self.known):,} parts measured"

    def report(
        self,
        on_progress: OnProgress = lambda done, total: None,
        cancelled: IsCancelled = never,
        elsewhere: MeasureParts | None = None,
        on_causes: OnCauses = ignore,
    ) -> AttributionReport:
        """Measure every module or subtree, and return a report. elsewhere: measures them in other processes; if None, they are
        measured in this process.

        `on_progress(done, total)` is called with the numbers of finished and of all measurements, and `on_causes` after each
        measurement with the contributions found so far. Once a subtree is split, its measured children replace it in these
        contributions. Raises NoForward, KernelError and Cancelled, and UserError under `torch.autocast`, because its casts belong
        to no weight.
        """
        if self.settings.autocast is not None:
            raise UserError(f"causes can only be found in the weights' dtypes: {hint('no-autocast')}")
        started = time.perf_counter()
        on_progress(0, MOST_PASSES)
        with self._runner(cancelled) as runner:
            self._run_reference(runner)
            unit, whole, _ = self._alone(runner)
            self._passes = 2 * len(self._bases) + len(self._stepped)

            def here(parts: Sequence[Part]) -> Iterator[tuple[int, PartDrift]]:
                size = 1 if not self.model.memory.limited else _SIDE_BY_SIDE
                for start in range(0, len(parts), size):
                    together = parts[start : start + size]
                    measured = runner.side_by_side([partial(self._part, runner, part) for part in together])
                    yield from enumerate(measured, start)

            def report(found: Iterable[Contribution]) -> AttributionReport:
                causes = tuple(sorted(found, key=lambda contribution: -contribution.drift))
                return AttributionReport(
                    model=self.model.title,
                    rules=self.rules,
                    unit=unit,
                    whole=whole,
                    together=math.fsum(cause.drift for cause in causes),
                    positions=sum(_rows(base.output) for base in self._bases),
                    passes=self._passes,
                    seconds=time.perf_counter() - started,
                    causes=causes,
                )

            def on_part(found: Iterable[Contribution], done: int, total: int) -> None:
                on_progress(done, total)
                on_causes(PartialAttribution(report(found), done, total))

            complete = report(self._contributions(elsewhere or here, whole, on_part) if whole else ())
            self.known.clear()
            return complete

    def measure(self, part: Part, cancelled: IsCancelled = never) -> PartDrift:
        """Measure one module or subtree. The first call also does the reference run. Raises NoForward, KernelError, Cancelled."""
        with self._runner(cancelled) as runner:
            if not self._bases:
                self._run_reference(runner)
            return self._part(runner, part)

    def _runner(self, cancelled: IsCancelled) -> ForwardRunner:
        return ForwardRunner(self.model, self.settings.of_weights(), cancelled, behavior=self.behavior)

    @property
    def _drifting(self) -> frozenset[int]:
        """The `id`s of weights whose casts change results, because the weight or the activations multiplied by it are rounded."""
        rounds = self.settings.quantize_activations == "weights"
        return frozenset(
            key
            for key, weight in self.model.by_id.items()
            if (weight.info.castable or weight.has_scales)
            and (
                not equals_reference(weight, weight.dtype)
                or (rounds and (form := weight.input_format) is not None and quantizes_activations(form.dtype))
            )
        )

    def _run_reference(self, runner: ForwardRunner) -> None:
        budget, positions = min(_BUDGET, self.model.cache_budget), 0
        runner.calibrate_caches(self.inputs.batches, run="reference")
        batches, size = self.inputs.batches, 1 if not self.model.memory.limited else _SIDE_BY_SIDE
        for start in range(0, len(batches), size):
            group = batches[start : start + size]
            run = partial(self._base, runner, budget=budget // len(group))
            for base in runner.side_by_side([partial(run, batch) for batch in group]):
                self._bases.append(base)
                budget = max(0, budget - base.nbytes)
                positions += _rows(base.output)
            if positions >= ENOUGH_POSITIONS:
                break
        if not self._bases:
            raise NoForward("there are no inputs to run the model on")
        if self.model.state_formats:
            self._stepped = [self._stepped_base(runner, base.batch) for base in self._bases]

    def _base(self, runner: ForwardRunner, batch: Batch, budget: int) -> _Base:
        recorder = ModuleRecorder(budget // 2)
        options = PassOptions(learns=True, cache_bytes=budget // 2)
        call = runner.reference_call(batch)
        ran, uses = runner.partial(call, self._drifting, lambda name: False, options, recorder)
        output = main_output(ran.output)[1].detach().clone()
        kept = {key: output for key, output in recorder.outputs.items() if key[0] in uses}
        masks = KeptPositions.of(self.model.module, batch, self.model.device, ran.attended)
        return _Base(batch, output, kept, ran.cache, uses, masks)

    def _stepped_base(self, runner: ForwardRunner, batch: Batch) -> _Base:
        """Return what the reference produces token by token. No outputs of modules are kept: a call that runs for each token writes
        what the next one reads, so none can be left out.
        """
        ran = runner.reference(self._steps(runner, batch))
        output = main_output(ran.output)[1].detach().clone()
        masks = KeptPositions.of(self.model.module, batch, self.model.device, ran.attended)
        return _Base(batch, output, {}, None, {}, masks)

    def _steps(self, runner: ForwardRunner, batch: Batch) -> Callable[[], Any]:
        return stepwise(runner.reference_batch(batch), self.model.module, why=STATES)

    def _contributions(self, run: MeasureParts, whole: float, on_part: _OnPart) -> list[Contribution]:
        """Return the contribution of each module. If there are more than `MOST_PASSES` modules, return those of subtrees instead,
        and split the subtrees that drift most. run: measures parts. whole: the drift of all casts together. on_part: called after
        each measurement.
        """
        modules = list(dict.fromkeys(name for base in self._bases for name in base.uses))
        if len(modules) <= MOST_PASSES:
            parts = [Part(name, (name,)) for name in modules]
            return self._measured(run, parts, whole, on_part, len(parts))
        contributions: dict[str, Contribution] = {}
        queue: list[tuple[float, str, list[str]]] = [(-math.inf, "", modules)]
        done = 0
        while queue:
            _, name, members = heapq.heappop(queue)
            parts = [Part(part, tuple(inside)) for part, inside in _children_of(name, members)]
            if done and done + len(parts) > MOST_PASSES:
                continue
            contributions.pop(name, None)
            measured = self._measured(run, parts, whole, on_part, MOST_PASSES, tuple(contributions.values()))
            done += len(parts)
            for part, contribution in zip(parts, measured, strict=True):
                label = f"{part.name} (its own)" if part.name in contributions else part.name
                contributions[label] = contribution
                if len(part.modules) > 1:
                    heapq.heappush(queue, (-contribution.drift, part.name, list(part.modules)))
        return list(contributions.values())

    def _measured(
        self,
        run: MeasureParts,
        parts: Sequence[Part],
        whole: float,
        on_part: _OnPart,
        total: int,
        others: Sequence[Contribution] = (),
    ) -> list[Contribution]:
        """Measure `parts`, and return their contributions. run: measures parts. whole: the drift of all casts together. total: the
        number of all measurements, for `on_part`. others: the contributions measured earlier, for `on_part`.
        """
        found: dict[int, Contribution] = {}

        def add(index: int, measured: PartDrift) -> None:
            part, drift = parts[index], measured.drift
            share = drift / whole if math.isfinite(whole) and whole else None
            found[index] = Contribution(part.name, len(part.modules), drift, share, measured.local_sqnr_db)
            self._passes += len(self._bases)
            self._done += 1

        def report() -> None:
            on_part((*others, *found.values()), min(total, self._done), total)

        for index, part in enumerate(parts):
            if part in self.known:
                add(index, self.known[part])
        if found:
            report()
        missing = [index for index in range(len(parts)) if index not in found]
        for at, measured in run([parts[index] for index in missing]) if missing else ():
            self.known[parts[missing[at]]] = measured
            add(missing[at], measured)
            report()
        return [found[index] for index in range(len(parts))]

    def _part(self, runner: ForwardRunner, part: Part) -> PartDrift:
        _, drift, local = self._alone(runner, part)
        return PartDrift(drift, local)

    def _alone(self, runner: ForwardRunner, part: Part | None = None) -> tuple[str, float, float | None]:
        """Run the model with cast weights only in the modules of `part`, or in all modules if `part` is None. Returns (the unit of
        the drift, the drift of the main output, the SQNR in dB of the part's own output). The SQNR is None if the part is not a
        single module.
        """
        comparison: OutputMetrics | None = None
        inside: Callable[[str], bool] = (lambda name: True) if part is None else frozenset(part.modules).__contains__
        amax = None
        if part is None or not set(part.modules) <= set(self.model.tree.caches):
            # With cast weights in the part, a cache has other values than in the reference run, and so other scales.
            amax = runner.partial_amax(self.inputs.batches, self._drifting, inside)
        local = _LocalError(part.modules[0] if part is not None and len(part.modules) == 1 else None)

        def measure(base: _Base) -> tuple[str, torch.Tensor]:
            local.reference, local.masks = base.modules, base.masks
            prefix = 0
            if part is not None and base.cache is not None and base.cache.calls:
                # A module that is not called for this batch does not limit the prefix.
                prefix = min(base.uses.get(name, len(base.cache.names)) for name in part.modules)
            options = PassOptions(earlier=base.cache, prefix=prefix, amax=amax)
            call = self._steps(runner, base.batch) if by_token else runner.reference_call(base.batch)
            ran, _ = runner.partial(call, self._drifting, inside, options, local)
            return main_output(ran.output)

        by_token = bool(self._stepped) and (part is None or any(name.endswith(KEPT) for name in part.modules))
        bases = self._stepped if by_token else self._bases
        outputs = runner.side_by_side([partial(measure, base) for base in bases])
        for base, (name, candidate) in zip(bases, outputs, strict=True):
            if comparison is None:
                dimension = classes_dimension(self.model.module, name, candidate, self.settings.classes_dim)
                comparison = OutputMetrics(dimension)
            kept = None if base.masks is None else base.masks.of_main(name, candidate)
            comparison.add(base.output, candidate, kept=kept)
        assert comparison is not None
        unit = unit_for(comparison.classes_dim, candidate.ndim)
        return unit, scalar_drift(comparison.result()), local.sqnr_db


class _LocalError(ModuleObserver):
    def __init__(self, module: str | None) -> None:
        self.module = module
        self.reference: dict[tuple[str, int], torch.Tensor] = {}
        self.masks: KeptPositions | None = None
        self._sums: ModuleSums | None = None

    @property
    def sqnr_db(self) -> float | None:
        """The SQNR in dB over all calls of the module whose outputs could be compared, or None without such calls."""
        return None if self._sums is None else sqnr_db(self._sums.sums.energy, self._sums.sums.noise)

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        kept = self.reference.get((module, call)) if module == self.module else None
        if kept is not None:
            positions = None if self.masks is None else self.masks.of_module(module, call, kept)
            sums = compare_outputs(kept, output, positions)
            if sums.comparable:
                self._sums = self._sums or ModuleSums()
                self._sums.add(sums)


def _children_of(name: str, modules: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (name of the child, its modules) for each child of the subtree `name`. If there is only one child, return this child's
    children instead. modules: the names of the modules in the subtree.
    """
    parts: dict[str, list[str]] = {}
    for module in modules:
        rest = module[len(name) + 1 :] if name else module
        child = rest.split(".")[0]
        parts.setdefault(f"{name}.{child}" if name and child else name or child, []).append(module)
    if len(parts) == 1:
        only, members = next(iter(parts.items()))
        if only != name and len(members) > 1:
            return _children_of(only, members)
    return list(parts.items())


def _rows(output: torch.Tensor) -> int:
    return output[..., 0].numel() if output.ndim else 1
