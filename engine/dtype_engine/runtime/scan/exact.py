"""The exact scan: measures, in separate passes, how far the output drifts with each weight cast to each dtype.

There is one exception, in compute dtypes such as bfloat16: the smallest of several weights that one operation uses is cast
together with the other weights of the operation (see `companions`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_formats import SCANNED
from dtype_engine.recipe import tensor_bytes
from dtype_engine.results.scan import ScanReport
from dtype_engine.runtime.measure.drift import DriftMeter, budget_for
from dtype_engine.runtime.model.weight import sharing
from dtype_engine.runtime.modes.reference import equals_reference
from dtype_engine.runtime.passes.one_pass import PassOptions
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.scan import saved as scan_file
from dtype_engine.runtime.scan.casts import is_free
from dtype_engine.runtime.scan.companions import CompanionsMode, added_drift
from dtype_engine.runtime.scan.routing import Key
from dtype_engine.runtime.scan.savable_scan import OnEstimate, OnStep, SavableScan
from dtype_engine.runtime.scan.saved import SavedScan
from dtype_engine.search.sensitivity import scalar_drift

_REPORT_EVERY = 64
"""The scan reports intermediate results each time that this many measurements are done."""


@dataclass(frozen=True, slots=True)
class MeasuredWeight:
    """The drift that was measured with one weight cast to one dtype."""

    key: Key
    score: float
    error: float | None
    """The standard error of `score`, or None if it is unknown."""
    unit: str
    forward_seconds: float
    """How many seconds a pass takes with no weight cast."""
    scan_seconds: float


@dataclass(repr=False)
class ExactScan(SavableScan):
    """Measures the drift of each weight in each dtype with a separate pass, in which the rest of the model equals the reference.
    Afterwards the model stays cast as in the last measurement, so the caller has to apply its recipe again.
    """

    done: dict[Key, tuple[float, float | None]] = field(default_factory=dict)
    """The (score, standard error) of each finished measurement, by (weight, dtype)."""

    def __post_init__(self) -> None:
        if any(weight.other_reference is not None for weight in self.model.weights.values()):
            raise UserError("--exact measures casts of one checkpoint: leave out --exact or --against")
        super().__post_init__()
        self._keys = [(name, dtype) for name, targets in self.wanted.items() for dtype in targets]
        self._costly = [key for key in self._keys if not is_free(self.model, *key, self.settings)]
        self._base = {
            name: weight.info.dtype
            if not weight.info.castable or equals_reference(weight, weight.info.dtype) or not weight.info.persistent
            else "float32"
            for name, weight in self.model.weights.items()
        }
        """For each weight, a dtype in which it causes no drift from the reference."""
        self._companions: dict[str, tuple[str, ...]] = {}
        self._rounded: dict[Key, bool] = {}
        """For dtypes with a rounding: whether the rounding chose values, which the model keeps, as a product uses the weight."""
        self._meter: DriftMeter | None = None
        if self.save is not None and self.save.exists():
            saved = scan_file.read(self.save, self.fingerprint, None, exact=True)
            self.done, self.unit = saved.measured or {}, saved.unit
            self.forward_seconds, self.scan_seconds = saved.forward_seconds, saved.scan_seconds

    @property
    def parts(self) -> int:
        """The number of measurements in the whole scan. Casts that round nothing need no measurement."""
        return len(self._costly)

    @property
    def private_bytes(self) -> int:
        """How many bytes a process needs in addition to the mapped files: float32 copies of weights whose stored dtype causes
        drift.
        """
        infos = {name: weight.info for name, weight in self.model.weights.items()}
        return sum(tensor_bytes(infos[name], dtype) for name, dtype in self._base.items() if dtype != infos[name].dtype)

    def pending(self) -> list[Key]:
        return [key for key in self.shard.of(self._costly) if key not in self.done]

    def run(
        self, on_progress: OnStep = ignore, on_estimate: OnEstimate = ignore, cancelled: IsCancelled = never
    ) -> ScanReport:
        """Perform all pending measurements. `on_progress("scan", done, total)` is called with the numbers of finished
        measurements and of all measurements, and `on_estimate(report)` with intermediate reports. Raises NoForward, KernelError,
        Cancelled.
        """
        if not self._costly:
            self._started(cancelled)
        count = len(self.shard.of(self._costly))
        before = count - len(self.pending())
        for done, key in enumerate(self.pending(), before + 1):
            self.add(self.measure(key, cancelled))
            on_progress("scan", done, count)
            if done % _REPORT_EVERY == 0:
                on_estimate(self.report())
        self._meter = None  # release the reference's outputs, which it holds
        return self.report()

    def measure(self, key: Key, cancelled: IsCancelled = never) -> MeasuredWeight:
        """Measure the drift with one weight cast to one dtype (`key`). Raises NoForward, KernelError, Cancelled."""
        started = time.perf_counter()
        meter = self._started(cancelled)
        name, dtype = key
        companions = self._companions.get(name, ()) if dtype in dtypes.COMPUTE_DTYPES else ()
        error: float | None = None

        def drift_of(names: tuple[str, ...]) -> float:
            nonlocal error
            if not names:
                return 0.0
            cast = dict.fromkeys(names, dtype) if name in self.model.weights else {}
            caches = {} if cast else {name: dtype.removeprefix(SCANNED)}
            shares = self._shares([name], dtype) if cast else {}
            if cast and not self._is_rounded(key, cancelled):
                cast = {name: dtypes.unrounded(dtype) for name in cast}  # these are its values
            self.model.apply(self._base | cast, cancelled=cancelled, caches=caches, shares=shares)
            output = meter.measure(cancelled=cancelled).output
            error = output.kl_mean_se
            return scalar_drift(output)

        score = added_drift(drift_of, name, companions)
        return MeasuredWeight(key, score, error, self.unit, self.forward_seconds, time.perf_counter() - started)

    def _shares(self, names: Sequence[str], dtype: str) -> dict[str, list[str]]:
        """Return the names of all weights over which a shared scale is computed, by the name of each weight that has one."""
        found = {name: [each.info.name for each in sharing(self.model.weights, name, dtype)] for name in names}
        return {name: among for name, among in found.items() if among}

    def _is_rounded(self, key: Key, cancelled: IsCancelled) -> bool:
        """Return whether a cast takes other values than the nearest ones. If it is not known, round this weight and those to be
        measured after it, as many as may stay in memory.
        """
        dtype = key[1]
        if not dtypes.BY_NAME[dtype].rounding:
            return True
        if key not in self._rounded:
            names, left = list[str](), self.model.cache_budget // 2
            for each in (each for each, other in self._costly[self._costly.index(key) :] if other == dtype):
                left -= self.model.weights[each].info.numel
                if names and left < 0 and not self.model.memory.limited:  # which keeps them in a file
                    break
                names.append(each)
            found = self.model.rounder.round_ahead(dict.fromkeys(names, dtype), self._shares(names, dtype), cancelled)
            self._rounded |= {(each, dtype): each in found for each in names}
        return self._rounded[key]

    def _started(self, cancelled: IsCancelled) -> DriftMeter:
        """Return the drift meter. The first call measures the model without casts, and finds weights that are used together."""
        if self._meter is None:
            with ForwardRunner(self.model, self.settings, cancelled, watch=False) as runner:
                around = partial(CompanionsMode, self._companions)
                runner.reference(runner.reference_call(self.inputs.batches[0]), PassOptions(around=around))
            meter = DriftMeter(self.model, self.inputs, self.settings, budget=budget_for(self.model))
            self.model.apply(self._base, cancelled=cancelled, caches={})
            first = meter.measure(cancelled=cancelled)
            self.unit = first.unit
            self.forward_seconds = first.seconds.candidate or 0.0
            self._meter = meter
        return self._meter

    def add(self, part: MeasuredWeight) -> None:
        """Add the result of one measurement, and save all results if the scan has a file."""
        self.done[part.key] = part.score, part.error
        self.unit = part.unit
        self.forward_seconds = self.forward_seconds or part.forward_seconds
        self.scan_seconds += part.scan_seconds
        self.save_if_wanted()

    def report(self) -> ScanReport:
        """Return the scores measured so far. Casts that round nothing have the score 0."""
        costly = set(self._costly)
        known = {
            key: self.done[key] if key in costly else (0.0, 0.0)
            for key in self._keys
            if key in self.done or key not in costly
        }
        return self.report_of(0, len(self.inputs.batches), known)

    def saved(self) -> SavedScan:
        return SavedScan(
            self.fingerprint,
            0,
            self.unit,
            self.forward_seconds,
            self.scan_seconds,
            self.parts,
            {},
            self.done,
            self.shard,
        )
