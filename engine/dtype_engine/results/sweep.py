"""What many recipes of one model give, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dtype_engine.results.drift import OutputDrift


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One recipe. drift: the one figure that recipes are ranked by, infinity where the output is not finite. best: it is
    finite, and no other recipe has fewer planned bytes and no more drift, or as many bytes and less drift.
    """

    recipe: str
    rules: tuple[str, ...]
    planned_bytes: int
    drift: float
    best: bool
    output: OutputDrift


@dataclass(frozen=True, slots=True)
class SweepReport:
    """All recipes, the smallest first. unit: of `drift`."""

    model: str
    inputs: str
    stored_bytes: int
    unit: str
    rows: tuple[SweepRow, ...]


def sweep_rows(measured: Sequence[tuple[str, tuple[str, ...], int, float, OutputDrift]]) -> tuple[SweepRow, ...]:
    """Rows of (recipe, rules, planned bytes, drift, output) in the order of a report, with those marked that are best."""
    return tuple(
        SweepRow(
            name, rules, planned, drift,
            math.isfinite(drift) and not any(
                other[2] <= planned and other[3] <= drift and (other[2] < planned or other[3] < drift)
                for other in measured
            ),
            output,
        )
        for name, rules, planned, drift, output in sorted(measured, key=lambda row: (row[2], row[3]))
    )  # fmt: skip
