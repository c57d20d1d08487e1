"""Finds rules that keep the values which casts make infinite or zero: each affected weight gets the nearest dtype that holds its
values. Such rules are searched even if the output is finite. For example, a BatchNorm with an infinite running variance outputs
zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import KernelError, NoForward
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.recipe import Plan, Rule, generalisations, make_plan, select
from dtype_engine.results.attribution import LossRemedy
from dtype_engine.results.drift import DriftReport, drifts_less
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.measure.drift import DriftMeter
from dtype_engine.runtime.measure.listener import MeasurementListener

Count = Callable[[str, str], ValueLoss | None]
"""A function `count(name, dtype)` that returns how many values of a tensor are lost in a cast, or None if they are only rounded."""


def untried_remedy(tree: Tree, plan: Plan, losses: Sequence[ValueLoss], count: Count, reason: str) -> LossRemedy | None:
    """Return rules that avoid the losses of casts (infinite, zeroed or saturated values), or None if casts only round values.

    losses: the numbers of such values under `plan`, for each weight that has some. count: counts the values that a cast to another
    dtype would lose. reason: a sentence that says why the drift under the rules is not measured.
    """
    wanted = {
        loss.tensor: holding_dtype(tree.tensors[loss.tensor], loss.dtype, count)
        for loss in losses
        if not loss.is_rounding
    }
    return _remedy(tree, plan, wanted, reason) if wanted else None


def tried_remedy(
    meter: DriftMeter,
    tree: Tree,
    plan: Plan,
    report: DriftReport,
    count: Count,
    on_trial: Callable[[int, int], None] = ignore,
    cancelled: IsCancelled = never,
) -> LossRemedy | None:
    """Return rules that avoid the losses of casts (`report.lost`), with the drift under these rules over the same sequences.
    Returns None if casts only round values. The first rules cast to the nearest dtypes that hold the values. If these do not reduce
    the drift, the stored dtypes are tried, too, and the better rules are returned.

    plan, report: the current dtypes, and the drift measured with them. count: counts the values that a cast to another dtype would
    lose. The model stays cast as in the last trial. `on_trial(done, total)` is called before each trial. Raises Cancelled.
    """
    first = untried_remedy(tree, plan, report.lost or (), count, "")
    if first is None:
        return None
    on_trial(0, 2)
    first = _tried(meter, tree, plan, first, report, cancelled)
    if first.improves:
        return first
    on_trial(1, 2)
    as_stored = _remedy(tree, plan, dict.fromkeys(first.tensors, dtypes.STORED), "")
    if as_stored.rules == first.rules:
        return first
    second = _tried(meter, tree, plan, as_stored, report, cancelled)
    if second.after is None or (first.after is not None and not drifts_less(second.after, first.after)):
        return first
    return second


def holding_dtype(tensor: TensorInfo, dtype: str, count: Count) -> str:
    """Return the dtype nearest to `dtype` that only rounds the tensor's values, whereas `dtype` itself loses some of them. Returns
    `STORED` if no such dtype has fewer bits than the stored one. count: counts the values that a cast to a dtype loses.
    """
    nearest = []
    if (row := dtypes.BY_NAME[dtype]).per_tensor:
        nearest.append(row.torch_name)
    nearest += ["bfloat16", "float32"]
    stored_bits = dtypes.BY_NAME[tensor.dtype if tensor.dtype in dtypes.BY_NAME else "float32"].bits
    for candidate in nearest:
        if candidate == dtype or dtypes.BY_NAME[candidate].bits >= stored_bits:
            continue
        loss = count(tensor.name, candidate)
        if loss is None or loss.is_rounding:
            return candidate
    return dtypes.STORED


def covering_rules(tree: Tree, wanted: Mapping[str, str]) -> list[Rule]:
    """Return rules that give each tensor in `wanted` its dtype and match no other tensor. A greedy search keeps the rules few."""
    rules = []
    for dtype in dict.fromkeys(wanted.values()):
        names = [name for name, target in wanted.items() if target == dtype]
        left = set(names)
        patterns = {}
        for name in names:
            for pattern in generalisations(name):  # one is the name itself
                taken = set(select(tree, pattern).tensors)
                if name in taken and taken <= left:
                    patterns[pattern] = taken
        while left:
            covered = {pattern: len(taken & left) for pattern, taken in patterns.items()}
            most = max(covered.values())
            equals = [pattern for pattern, count in covered.items() if count == most]
            best = min(equals, key=len) if most > 1 else equals[0]  # for a single tensor, its name
            rules.append(Rule.make(best, dtype))
            left -= patterns[best]
    return rules


def _remedy(tree: Tree, plan: Plan, wanted: Mapping[str, str], reason: str) -> LossRemedy:
    rules = covering_rules(tree, wanted)
    after = make_plan(tree, plan.recipe.then(*rules))
    return LossRemedy(tuple(map(str, rules)), tuple(wanted), plan.planned_bytes, after.planned_bytes, reason=reason)


def _tried(
    meter: DriftMeter, tree: Tree, plan: Plan, remedy: LossRemedy, report: DriftReport, cancelled: IsCancelled
) -> LossRemedy:
    recipe = plan.recipe.then(*map(Rule.parse, remedy.rules))
    plan = make_plan(tree, recipe)
    meter.model.apply(plan.dtypes, cancelled=cancelled, caches=plan.caches)
    before, sequences = report.output, report.sequences.done
    try:
        with closing(meter.readings(MeasurementListener(cancelled=cancelled))) as readings:
            totals = next(totals for totals in readings if totals.extent.done >= sequences)
        return dataclasses.replace(remedy, before=before, after=totals.output)
    except (KernelError, NoForward) as error:
        return dataclasses.replace(remedy, before=before, reason=str(error))
