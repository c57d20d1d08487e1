"""The exhaustive truth that the scan estimates: every weight in every dtype measured alone, one candidate pass each."""

from __future__ import annotations

import time
from concurrent.futures import Executor

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import tensor_bytes
from dtype_engine.results.drift import (
    NATS,
    NATS_PER_EXAMPLE,
    SQUARED,
    OutputDrift,
    ScanReport,
    WeightScore,
)
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.drift import DriftMeter, Measurement
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.runner import reference_name
from dtype_engine.runtime.scan.evaluation import InLine
from dtype_engine.runtime.scan.scan import OnEstimate, OnProgress, scanned_dtypes
from dtype_engine.search.sensitivity import is_lossless, scalar_drift


def alone(model: LiveModel) -> dict[str, str]:
    """The dtypes in which nothing drifts: as stored, those narrower than the reference in its dtype."""
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
    on_progress: OnProgress = lambda what, done, total: None,
    on_estimate: OnEstimate = lambda report: None,
    cancelled: IsCancelled = never,
    executor: Executor | None = None,
) -> ScanReport:
    """Measure them all; what comes before the weight is not run again. Leaves the model cast in its own way: the caller
    puts its recipe back. `executor` evaluates the plans; by default in line.

    Raises NoForward, KernelError, Cancelled.
    """
    meter = DriftMeter(model, inputs, settings)
    base = alone(model)
    started = time.perf_counter()
    model.apply(base, cancelled=cancelled)
    first: Measurement = meter.measure(cancelled=cancelled)
    forward = first.candidate_seconds
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
            unit=_unit(first),
            exact=True,
            draws=0,
            sequences=len(inputs.batches),
            all_sequences=len(inputs.batches),
            dtypes=dtypes,
            forward_seconds=forward,
            scan_seconds=time.perf_counter() - started,
            weights=tuple(scores),
            notices=model.notices,
        )

    def evaluate(key: tuple[str, str]) -> OutputDrift:
        model.apply(base | dict([key]), cancelled=cancelled)
        return meter.measure(cancelled=cancelled).output

    costly = [(name, dtype) for name, dtype in wanted if not is_lossless(model.weights[name].info.dtype, dtype)]
    outputs = (executor or InLine()).map(evaluate, costly)
    for done, (name, dtype) in enumerate(wanted):
        info = model.weights[name].info
        if is_lossless(info.dtype, dtype):
            scores.append(WeightScore(name, dtype, tensor_bytes(info, dtype), 0.0, 0.0))
            continue
        output = next(outputs)
        scores.append(WeightScore(name, dtype, tensor_bytes(info, dtype), scalar_drift(output), output.kl_mean_se))
        on_progress("scan", done + 1, len(wanted))
        if done % 64 == 63:
            on_estimate(report())
    return report()


def _unit(measured: Measurement) -> str:
    if measured.output.kl_mean is None:
        return SQUARED
    return NATS if measured.dimensions > 2 else NATS_PER_EXAMPLE
