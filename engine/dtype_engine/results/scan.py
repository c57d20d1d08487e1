"""What scans and searches give: scores of weights, predicted drift, a Pareto front. Bytes are planned ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes, plural, with_error
from dtype_engine.results.losses import ValueLoss


@dataclass(frozen=True, slots=True)
class WeightScore:
    """What one weight in one dtype, everything else as in the reference, adds to the drift.

    `bytes` are those of the weight in that dtype, scales included. `score` is in the report's unit, infinity where the
    output is not finite; `error` is its standard error, over sequences (over draws while there is but one).
    """

    name: str
    dtype: str
    bytes: int
    score: float
    error: float | None = None


@dataclass(frozen=True, slots=True)
class ScanReport:
    """How much every castable weight matters, in every dtype asked for.

    unit: `NATS` (or `NATS_PER_EXAMPLE`, `NATS_PER_PIXEL`) where the output is a distribution, else `SQUARED`: of the main output,
    the square of relative L2. exact: each was measured alone, else estimated from `draws` backward passes a sequence. `sequences`
    of `all_sequences` have gone by. A weight that stays at least as wide as the reference costs nothing. activations: the setting
    `quantize_activations` under which it was made.
    """

    model: str
    device: str
    reference: str
    inputs: str
    unit: str
    exact: bool
    draws: int
    sequences: int
    all_sequences: int
    dtypes: tuple[str, ...]
    forward_seconds: float
    scan_seconds: float
    weights: tuple[WeightScore, ...]
    notices: tuple[str, ...] = ()
    activations: Literal["none", "weights"] = "none"

    def __repr__(self) -> str:
        names = {weight.name for weight in self.weights}
        lines = [
            f"ScanReport: {printable(self.model, 100)} on {self.device} against {self.reference}",
            f"  weights {len(names):,} in {', '.join(map(dtypes.short_name, self.dtypes))}, "
            + ("each measured alone" if self.exact else f"estimated, {self.draws} backward passes a sequence"),
            f"  inputs  {self.sequences} of {plural(self.all_sequences, 'sequence')}: {printable(self.inputs, 200)}",
        ]
        if self.weights:
            most = max(self.weights, key=lambda weight: weight.score)
            lines.append(
                f"  most    {printable(most.name, 200)} in {dtypes.short_name(most.dtype)}: "
                f"{with_error(most.score, most.error)} {self.unit}"
            )
        return "\n".join(lines)

    def scores(self) -> dict[tuple[str, str], float]:
        """Scores by (weight, dtype)."""
        return {(weight.name, weight.dtype): weight.score for weight in self.weights}

    def totals(self) -> list[tuple[float, str]]:
        """The sum of the scores of all weights in each dtype, and the dtype; the smallest first."""
        scores: dict[str, list[float]] = {}
        for weight in self.weights:
            scores.setdefault(weight.dtype, []).append(weight.score)
        return sorted((math.fsum(scores[dtype]), dtype) for dtype in self.dtypes if dtype in scores)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The drift that a scan predicts for a recipe: the sum of its weights' own scores. Errors need not add up."""

    value: float
    unit: str
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A point of the Pareto front: planned bytes, and predicted drift."""

    bytes: int
    predicted: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe near the limit of a search, predicted and measured."""

    planned_bytes: int
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The recipe that was found, as rules, with its planned bytes and predicted drift, and the whole Pareto front; `lost`: the
    weights whose cast by it loses values; `candidates`: those that were measured to find it, on `held_out` inputs.
    """

    model: str
    unit: str
    rules: tuple[str, ...]
    stored_bytes: int
    planned_bytes: int
    predicted: float
    front: tuple[FrontPoint, ...]
    measured: float | None = None
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    held_out: str | None = None

    def __repr__(self) -> str:
        measured = "" if self.measured is None else f", measured {self.measured:.4e}"
        rules = ", ".join(self.rules) or "none: as stored"
        return (
            f"SearchReport: {printable(self.model, 100)}, the best of {plural(len(self.front), 'point')} of the Pareto front\n"
            f"  rules   {printable(rules, 300)}\n"
            f"  memory  stored {human_bytes(self.stored_bytes)} → planned {human_bytes(self.planned_bytes)}\n"
            f"  drift   predicted {self.predicted:.4e}{measured} {self.unit}"
        )
