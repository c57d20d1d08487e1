"""The exhaustive truth that the scan estimates: every weight in every dtype measured alone, one candidate pass each."""

from __future__ import annotations

import time

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import tensor_bytes
from dtype_engine.results.drift import unit_for
from dtype_engine.results.scan import ScanReport, WeightScore
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.drift import DriftMeter
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import reference_name
from dtype_engine.runtime.scan.scan import OnEstimate, OnProgress, scanned_dtypes
from dtype_engine.search.sensitivity import is_lossless, scalar_drift

_REPORT_EVERY = 64
"""Measurements between two reports of what is known so far."""


def reference_dtypes(model: LiveModel) -> dict[str, str]:
    """The dtypes in which nothing drifts: float32, and as stored what is not cast or not narrower than the reference."""
    return {
        name: weight.info.dtype
        if not weight.info.castable or is_lossless(weight.info.dtype, weight.info.dtype) or not weight.info.persistent
        else "float32"
        for name, weight in model.weights.items()
    }


def exact_sensitivities(
    model: LiveModel,
    inputs: Inputs,
    dtypes: tuple[str, ...],
    settings: RunSettings,
    on_progress: OnProgress = lambda step, done, total: None,
    on_estimate: OnEstimate = lambda report: None,
    cancelled: IsCancelled = never,
) -> ScanReport:
    """Measure every weight in each dtype, everything else as in the reference; what comes before the weight in a pass is
    not run again.

    `on_progress("scan", done, total)` counts measurements; `on_estimate(report)` has those done so far. The model is left
    cast as last measured: the caller puts its recipe back. Raises NoForward, KernelError, Cancelled.
    """
    meter = DriftMeter(model, inputs, settings)
    base = reference_dtypes(model)
    started = time.perf_counter()
    model.apply(base, cancelled=cancelled)
    first = meter.measure(cancelled=cancelled)
    wanted = [
        (name, dtype)
        for name, weight in model.weights.items()
        if weight.info.castable and weight.info.persistent
        for dtype in scanned_dtypes(weight, dtypes)
    ]
    scores: list[WeightScore] = []

    def report() -> ScanReport:
        return ScanReport(
            model=model.title,
            device=str(model.device),
            reference=reference_name(model),
            inputs=inputs.description,
            unit=unit_for(first.output.kl_mean is not None, first.dimensions),
            exact=True,
            draws=0,
            sequences=len(inputs.batches),
            all_sequences=len(inputs.batches),
            dtypes=dtypes,
            forward_seconds=first.candidate_seconds,
            scan_seconds=time.perf_counter() - started,
            weights=tuple(scores),
            notices=model.notices,
        )

    for done, (name, dtype) in enumerate(wanted):
        info = model.weights[name].info
        if is_lossless(info.dtype, dtype):
            scores.append(WeightScore(name, dtype, tensor_bytes(info, dtype), 0.0, 0.0))
            continue
        model.apply(base | {name: dtype}, cancelled=cancelled)
        output = meter.measure(cancelled=cancelled).output
        scores.append(WeightScore(name, dtype, tensor_bytes(info, dtype), scalar_drift(output), output.kl_mean_se))
        on_progress("scan", done + 1, len(wanted))
        if (done + 1) % _REPORT_EVERY == 0:
            on_estimate(report())
    return report()
