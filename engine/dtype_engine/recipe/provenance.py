"""Writes the recipe file of a run, with the measured metrics and with comments that say what each rule selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtype_engine.core.options import RunSettings
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import human_bytes, plural
from dtype_engine.recipe.file import Figure, write_recipe
from dtype_engine.recipe.plan import Plan, RuleEffect
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.figures import figures_in
from dtype_engine.results.losses import ValueLoss, severe
from dtype_engine.results.rounding import FittedTo

_DIGITS = 6
"""Significant digits of a metric: enough to compare runs, and few enough that rounding noise does not change the file."""

_COMMENTS = {
    "reference": "what the drift is measured from",
    "stored_bytes": "tensors as stored",
    "planned_bytes": "under these rules, exact",
    "overflowed": "values of weights that became infinite",
    "vanished": "values of weights that became zero",
}


def _figures(
    plan: Plan, report: DriftReport | None, versions: Mapping[str, str], losses: Sequence[ValueLoss] | None
) -> dict[str, Figure]:
    """Return the entry `measured` of a recipe file: bytes, versions of libraries, the drift of the main output, and how many values
    the casts lose. losses: the tensors that lose values, or None if unknown.
    """
    measured: dict[str, Figure] = {"stored_bytes": plan.stored_bytes, "planned_bytes": plan.planned_bytes}
    if report is not None:
        for row in figures_in("recipe"):
            value = row.of(report.output)
            if value is not None:
                measured[row.name] = float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
        measured |= {f"metric {change.name}": str(change) for change in report.metrics}
        measured |= {"output": report.output_name, "inputs": report.inputs_run, "reference": report.reference}
        measured["device"] = report.device
    measured |= versions
    if losses is not None:
        measured["tensors_that_lose_values"] = len(losses)
        measured["overflowed"] = sum(loss.overflowed for loss in losses)
        measured["vanished"] = sum(loss.vanished for loss in losses)
    return measured


def recipe_text(
    tree: Tree,
    plan: Plan,
    title: str,
    settings: RunSettings | None = None,
    report: DriftReport | None = None,
    versions: Mapping[str, str] | None = None,
    lost: Sequence[ValueLoss] | None = None,
    fitted_to: FittedTo | None = None,
) -> str:
    """Return the text of a recipe file for a plan, with comments and units.

    title: the name of the model. report: the measurement of the plan. lost: the tensors that lose values, or None if unknown; not
    used if the report lists them. versions: the versions of the libraries, by name. fitted_to: the calibration
    inputs to which roundings were fitted.
    """
    losses = report.lost if report is not None and report.lost is not None else lost
    return write_recipe(
        plan.recipe,
        title,
        settings,
        _figures(plan, report, versions or {}, losses),
        comments=[_selected_text(effect) for effect in plan.effects(tree)],
        units=_COMMENTS | {row.name: row.comment for row in figures_in("recipe") if row.comment},
        lost=[*severe(losses or ()), *(loss for loss in losses or () if loss.is_rounding)],
        fitted_to=fitted_to,
    )


def _selected_text(effect: RuleEffect) -> str:
    taken, size = len(effect.tensors), f"{human_bytes(effect.bytes_before)} -> {human_bytes(effect.bytes_after)}"
    decides = "" if effect.decides == effect.matches else f", decides {effect.decides}"
    if effect.caches and not taken:
        return f"{plural(len(effect.caches), 'tensor')} of KV caches{decides}"
    caches = f" and {len(effect.caches)} of KV caches" if effect.caches else ""
    return f"{plural(taken, 'tensor')}{caches}{decides}, {size}"
