"""Where a recipe's drift arises: each part of the model run as cast by itself, everything else as the reference.

A part is a module that has weighted operations of its own (a Linear, a norm, an embedding), or, where there are too many
of those to run each, a subtree. Its drift is that of the main output in a pass where only its weighted operations
compute on the weights as cast; its local error is that of its own output in that pass, where it is given the reference's
inputs. Errors need not add up, and the rounding of operations without weights between modules (sums, activations) belongs
to no part, so the parts' sum stands beside the whole.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.results.attribution import AttributionReport, Contribution
from dtype_engine.results.drift import unit_for
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.measure.comparison import (
    KeptOutput,
    ModuleSums,
    OutputRecorder,
    compare_outputs,
    is_distribution,
)
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.metrics import OutputComparison, sqnr_db
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.passes.trace import ForwardTrace
from dtype_engine.search.sensitivity import is_lossless, scalar_drift

MOST_PASSES = 160
"""Parts that are run at most: with more modules than these, subtrees are, and those that drift most are looked into."""
ENOUGH_POSITIONS = 256
"""Batches are taken until this many rows of output are compared."""
_BUDGET = 1 << 30
"""Bytes of reference outputs that are kept: half to reuse in later passes, half to compare with."""

OnProgress = Callable[[int, int], None]


@dataclass(slots=True)
class _Base:
    """One batch under the reference: its main output, each module's outputs, and the calls whose outputs may be reused."""

    batch: Batch
    name: str
    output: torch.Tensor
    modules: dict[tuple[str, int], KeptOutput]
    trace: ForwardTrace


@dataclass
class Attribution:
    """Attributes the drift of a model, as it is cast now, to its parts. `report` runs the passes."""

    model: LiveModel
    inputs: Inputs
    settings: RunSettings
    rules: tuple[str, ...] = ()
    _bases: list[_Base] = field(default_factory=list)
    _uses: dict[str, int] = field(default_factory=dict)
    _passes: int = 0
    _done: int = 0

    def report(
        self, on_progress: OnProgress = lambda done, total: None, cancelled: IsCancelled = never
    ) -> AttributionReport:
        """Run every part. `on_progress(done, total)` counts parts.

        Raises NoForward, KernelError, Cancelled, and UserError under `torch.autocast`, whose casts belong to no weight.
        """
        if self.settings.autocast is not None:
            raise UserError("causes are told of the weights' dtypes: turn torch.autocast off first")
        started = time.perf_counter()
        with ForwardRunner(self.model, RunSettings(compute=self.settings.compute), cancelled) as runner:
            self._run_reference(runner)
            unit, whole, _ = self._alone(runner, lambda name: True, 0, None)
            contributions = self._parts(runner, whole, on_progress) if whole else []
        contributions.sort(key=lambda contribution: -contribution.drift)
        return AttributionReport(
            model=self.model.title,
            rules=self.rules,
            unit=unit,
            whole=whole,
            together=math.fsum(contribution.drift for contribution in contributions) if contributions else 0.0,
            positions=sum(_rows(base.output) for base in self._bases),
            passes=self._passes,
            seconds=time.perf_counter() - started,
            causes=tuple(contributions),
        )

    @property
    def _drifting(self) -> frozenset[int]:
        """The weights that do not compute as the reference does."""
        return frozenset(
            key
            for key, weight in self.model.by_id.items()
            if (weight.info.castable or weight.scale is not None) and not is_lossless(weight.info.dtype, weight.dtype)
        )

    def _run_reference(self, runner: ForwardRunner) -> None:
        budget = _BUDGET
        positions = 0
        for batch in self.inputs.batches:
            trace = ForwardTrace({}, "reference", budget // 2)
            recorder = OutputRecorder(budget // 2)
            output, mode = runner.run_partial(batch, self._drifting, lambda name: False, recorder, trace)
            self._passes += 1
            for name, before in mode.uses.items():
                self._uses[name] = min(before, self._uses.get(name, before))
            name, tensor = main_output(output)
            kept = {key: entry for key, entry in recorder.kept.items() if key[0] in mode.uses}
            self._bases.append(_Base(batch, name, tensor.detach().clone(), kept, trace))
            budget = max(0, budget - trace.nbytes - sum(copy.nbytes for copy, _ in kept.values()))
            positions += _rows(tensor)
            if positions >= ENOUGH_POSITIONS:
                break
        if not self._bases:
            raise NoForward("there are no inputs to run the model on")

    def _parts(self, runner: ForwardRunner, whole: float, on_progress: OnProgress) -> list[Contribution]:
        """All modules one by one if there are few enough, else the largest subtrees opened again and again."""
        modules = sorted(self._uses, key=lambda name: self._uses[name])
        if len(modules) <= MOST_PASSES:
            parts = [(name, [name]) for name in modules]
            return [self._measured(runner, *part, whole, on_progress, len(parts)) for part in parts]
        contributions: dict[str, Contribution] = {}
        queue: list[tuple[float, str, list[str]]] = [(-math.inf, "", modules)]
        done = 0
        while queue:
            _, name, members = heapq.heappop(queue)
            parts = _opened(name, members)
            if done and done + len(parts) > MOST_PASSES:
                continue
            contributions.pop(name, None)
            for part, members in parts:
                done += 1
                label = f"{part} (its own)" if part in contributions else part
                contributions[label] = self._measured(runner, part, members, whole, on_progress, MOST_PASSES)
                if len(members) > 1:
                    heapq.heappush(queue, (-contributions[label].drift, part, members))
        return list(contributions.values())

    def _measured(
        self,
        runner: ForwardRunner,
        name: str,
        modules: Sequence[str],
        whole: float,
        on_progress: OnProgress,
        total: int,
    ) -> Contribution:
        members = frozenset(modules)
        single = modules[0] if len(modules) == 1 else None
        _, drift, local = self._alone(runner, members.__contains__, min(map(self._uses.__getitem__, members)), single)
        self._done += 1
        on_progress(min(total, self._done), total)
        share = drift / whole if math.isfinite(whole) and whole else None
        return Contribution(name, len(modules), drift, share, local)

    def _alone(
        self, runner: ForwardRunner, inside: Callable[[str], bool], prefix: int, watched: str | None
    ) -> tuple[str, float, float | None]:
        """Unit and drift of the main output with only some modules as cast, and the SQNR of one module's own output."""
        comparison: OutputComparison | None = None
        local = _LocalError(watched)
        for base in self._bases:
            local.reference = base.modules
            earlier = base.trace if base.trace.calls else None
            output, _ = runner.run_partial(base.batch, self._drifting, inside, local, None, earlier, prefix)
            self._passes += 1
            name, candidate = main_output(output)
            if comparison is None:
                comparison = OutputComparison(is_distribution(name, candidate))
            comparison.add(base.output, candidate, None)
        assert comparison is not None
        unit = unit_for(comparison.distribution, candidate.ndim)
        return unit, scalar_drift(comparison.result()), local.sqnr_db


class _LocalError:
    """Observes a pass: compares the outputs of one module with the reference's."""

    def __init__(self, module: str | None) -> None:
        self.module = module
        self.reference: dict[tuple[str, int], KeptOutput] = {}
        self._sums: ModuleSums | None = None

    @property
    def sqnr_db(self) -> float | None:
        """In dB, over all calls that could be compared; None where there was none."""
        return None if self._sums is None else sqnr_db(self._sums.energy, self._sums.noise)

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        kept = self.reference.get((module, call)) if module == self.module else None
        if kept is not None:
            sums = compare_outputs(kept[0], kept[1], output)
            if sums.comparable:
                self._sums = self._sums or ModuleSums()
                self._sums.add(sums)

    def replay(self, module: str, reading: object) -> None:
        """Only calls before the part are replayed: they are as in the reference."""


def _opened(name: str, modules: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The parts that a subtree falls into one level down, going on down while there is only one."""
    parts: dict[str, list[str]] = {}
    for module in modules:
        rest = module[len(name) + 1 :] if name else module
        child = rest.split(".")[0]
        parts.setdefault(f"{name}.{child}" if name and child else name or child, []).append(module)
    if len(parts) == 1:
        only, members = next(iter(parts.items()))
        if only != name and len(members) > 1:
            return _opened(only, members)
    return list(parts.items())


def _rows(output: torch.Tensor) -> int:
    return output[..., 0].numel() if output.ndim else 1
