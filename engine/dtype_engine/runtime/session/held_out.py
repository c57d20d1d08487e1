"""Measures a recipe on inputs that are neither those of its calibration nor those on which its drift is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Plan
from dtype_engine.results.rounding import HeldOut
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.drift import DriftMeter, budget_for
from dtype_engine.runtime.measure.running_totals import RunningTotals
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.model_behavior import ModelBehavior


def measure_held_out(
    model: LiveModel,
    inputs: Inputs,
    plan: Plan,
    settings: RunSettings,
    behavior: ModelBehavior,
    on_progress: Callable[[int, int], None],
    cancelled: IsCancelled,
) -> HeldOut:
    """Measure the drift of a plan on `inputs` and, if it has roundings, that of the same plan without them. The caller casts the
    model back. on_progress: called with the numbers of finished and of all measurements. Raises NoForward, KernelError, Cancelled.
    """
    meter = DriftMeter(model, inputs, settings, budget_for(model), behavior)
    nearest = {name: dtypes.unrounded(dtype) for name, dtype in plan.dtypes.items()}
    count = 1 + (nearest != plan.dtypes)

    def measured(planned: Mapping[str, str], done: int) -> RunningTotals:
        on_progress(done, count)
        model.apply(planned, cancelled=cancelled, caches=plan.caches)
        return meter.measure(cancelled=cancelled)

    rounded = measured(plan.dtypes, 0)
    without = measured(nearest, 1).output if count > 1 else None
    on_progress(count, count)
    return HeldOut(inputs.description, rounded.output, rounded.extent, without)
