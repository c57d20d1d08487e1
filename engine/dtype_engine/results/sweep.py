"""The results of measuring many recipes on one model, for comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.metrics import MetricChange


@dataclass(frozen=True, slots=True)
class SweepRow:
    """The result of one recipe."""

    recipe: str
    """The path of the recipe file."""
    rules: tuple[str, ...]
    planned_bytes: int
    drift: float
    """The drift by which recipes are ranked, in the unit of the `SweepReport`. Infinity if the output is not finite."""
    best: bool
    """Whether the output is finite, and no other recipe is at least as good in planned bytes and in drift, and better in one."""
    output: OutputDrift
    metrics: tuple[MetricChange, ...] = ()
    """The user's own metrics, such as an accuracy."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The results of all recipes, by increasing planned bytes. `unit` is the unit of `SweepRow.drift`."""

    model: str
    inputs: str
    stored_bytes: int
    unit: str
    rows: tuple[SweepRow, ...]


def sweep_rows(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """Return the rows by increasing planned bytes, with the best recipes marked."""
    marked = []
    for row in sorted(rows, key=lambda row: (row.planned_bytes, row.drift)):
        others = (other for other in rows if (other.planned_bytes, other.drift) != (row.planned_bytes, row.drift))
        beaten = any(other.planned_bytes <= row.planned_bytes and other.drift <= row.drift for other in others)
        marked.append(replace(row, best=math.isfinite(row.drift) and not beaten))
    return tuple(marked)
