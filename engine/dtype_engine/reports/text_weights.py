"""Formats the comparison of two checkpoints' weights as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, plural
from dtype_engine.reports.text_table import table_lines
from dtype_engine.results.weights import WeightDifference, WeightsComparison

_SHOWN = 3


def comparison_text(report: WeightsComparison) -> str:
    """Return a table of the weights whose values differ (lowest SQNR first), then the number of equal weights, then the weights
    that only one of the checkpoints has.
    """
    equal = [weight for weight in report.weights if weight.equal]
    lines = [
        f"reference  {printable(report.reference, 200)}",
        f"candidate  {printable(report.candidate, 200)}",
    ]
    if differing := report.weights[: len(report.weights) - len(equal)]:
        lines += _table(differing)
    lines += [f"equal      {plural(len(equal), 'weight')}"] if equal else []
    lines += [f"           {_name(weight)}: rows {weight.rows}" for weight in equal if weight.rows]
    for shape in report.shapes:
        shapes = f"{list(shape.reference)} in the reference, {list(shape.candidate)} in the candidate"
        lines.append(f"shape      {printable(shape.name, 200)}: {shapes}")
    for side, names in (("reference", report.only_reference), ("candidate", report.only_candidate)):
        if names:
            more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            shown = ", ".join(printable(name, 200) for name in names[:_SHOWN])
            lines.append(f"only in the {side}: {plural(len(names), 'weight')}, {shown}{more}")
    lines += [f"stopped    {plural(report.pending, 'weight')} not compared yet"] if report.pending else []
    return "\n".join(lines)


def _table(differing: Sequence[WeightDifference]) -> list[str]:
    head = ("weight", "stored", "SQNR", "max |Δ|", "mean |Δ|", "rows")
    rows = []
    for weight in differing:
        stored = f"{dtypes.short_name(weight.reference)}→{dtypes.short_name(weight.candidate)}"
        figures = (decibels(weight.sqnr_db), f"{weight.max_abs:.3e}", f"{weight.mean_abs:.3e}")
        rows.append((_name(weight), stored, *figures, weight.rows))
    return table_lines([head if any(row[-1] for row in rows) else (*head[:-1], ""), *rows], (2, 3, 4))


def _name(weight: WeightDifference) -> str:
    """Return the name of a weight, or both names if they differ: `blk.0.attn_q.weight = model.layers.0.self_attn.q_proj.weight`."""
    name = printable(weight.name, 100)
    return name if weight.name == weight.reference_name else f"{printable(weight.reference_name, 100)} = {name}"
