"""The results of measuring many recipes on one model, for comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    """What recipes are ranked by, in the unit of the `SweepReport`. Infinity if the output is not finite."""
    best: bool
    """Whether the recipe is on the Pareto front: its output is finite, and no other is at least as good in planned bytes and drift
    and better in one of the two.
    """
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


def sweep_rows(
    measured: Sequence[tuple[str, tuple[str, ...], int, float, OutputDrift, tuple[MetricChange, ...]]],
) -> tuple[SweepRow, ...]:
    """Return one row for each recipe, the smallest first. measured: the fields of each row without `best`."""
    return tuple(
        SweepRow(
            name, rules, planned, drift,
            math.isfinite(drift) and not any(
                other[2] <= planned and other[3] <= drift and (other[2] < planned or other[3] < drift)
                for other in measured
            ),
            output,
            metrics,
        )
        for name, rules, planned, drift, output, metrics in sorted(measured, key=lambda row: (row[2], row[3]))
    )  # fmt: skip
