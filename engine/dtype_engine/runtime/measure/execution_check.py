"""Compares executions of one model: the same weights in the same dtypes, with another kernel, batch or decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.execution import PLAIN, Execution
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Plan
from dtype_engine.results.drift import first_different
from dtype_engine.results.execution import ExecutionReport, ExecutionRow
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.libraries.hf_private import attention_of
from dtype_engine.runtime.measure.drift import DriftMeter, budget_for
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.model_behavior import ModelBehavior

_MANY = 8
"""The largest batch that is tried."""


def usual_executions(model: LiveModel, inputs: Inputs) -> tuple[Execution, ...]:
    """Return the executions that are compared if the user names none: those that differ from how the model runs by itself."""
    now, count = attention_of(model.module), len(inputs.batches)
    found = [Execution(attention=name) for name in ("eager", "sdpa", "math") if now not in (None, name)]
    batches = sorted({min(2, count), min(_MANY, count)} - {1})
    found += [Execution(batch=size) for size in batches]
    if batches and len({batch.elements for batch in inputs.batches}) > 1:  # otherwise nothing is padded
        found.append(Execution(batch=batches[-1], padding="left"))
    if all("input_ids" in batch.kwargs for batch in inputs.batches):
        found.append(Execution(decode=True))
    if model.device.type == "cpu":
        found += [Execution(mkldnn=False), Execution(threads=1 if torch.get_num_threads() > 1 else 2)]
    return tuple(found)


def compare_executions(
    model: LiveModel,
    inputs: Inputs,
    plan: Plan,
    settings: RunSettings,
    behavior: ModelBehavior,
    executions: Sequence[Execution],
    on_progress: Callable[[int, int], None],
    cancelled: IsCancelled,
) -> ExecutionReport:
    """Return how far the outputs of the model as it is cast to `plan` move under each of `executions`. The base is the execution of
    the model by itself, one sequence at a time. on_progress: called with the numbers of finished and of all executions. Raises
    NoForward if the model can't be run at all, KernelError, Cancelled.
    """
    meter = DriftMeter(model, inputs, budget=budget_for(model), behavior=behavior, base="candidate")
    listener = MeasurementListener(cancelled=cancelled, all_modules=lambda: True)
    rows = []
    for done, execution in enumerate(executions):
        on_progress(done, len(executions))
        meter.settings = dataclasses.replace(settings, execution=execution, reference_execution=PLAIN)
        try:
            totals = meter.measure(listener)
        except (NoForward, UserError) as error:
            rows.append(ExecutionRow(str(execution), None, why_not=error.sentence))
            continue
        rows.append(ExecutionRow(str(execution), totals.output, first_different(totals.modules)))
    on_progress(len(executions), len(executions))
    if rows and all(row.output is None for row in rows):
        raise NoForward(rows[0].why_not)
    return ExecutionReport(
        model.title, str(model.device), tuple(map(str, plan.recipe.rules)), inputs.description, tuple(rows)
    )
