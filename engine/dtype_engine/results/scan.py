"""The results of scans and searches: scores of weights, predicted drift, and a Pareto front. Bytes are of planned dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from dtype_engine.core import dtypes
from dtype_engine.core.text import Name, brief
from dtype_engine.core.units import human_bytes, plural, with_error
from dtype_engine.results.coverage import Coverage
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.expert_tokens import ExpertTokens
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.metrics import MetricChange

_Point = TypeVar("_Point")


@dataclass(frozen=True, slots=True)
class WeightScore:
    """The drift of the output if one weight is in one dtype, while the rest of the model equals the reference."""

    name: Name
    dtype: str
    bytes: int
    """The bytes of the weight in this dtype, scales included."""
    score: float
    """The drift of the output in the unit of the `ScanReport`; infinity if the output is not finite."""
    error: float | None = None
    """The standard error over sequences or, for a single sequence, over backward passes. About 95 % of exact scores are within two
    standard errors.
    """
    rounding_gain: float | None = None
    """For a dtype with a rounding, such as int4@g32:gptq: the squared error of the layer's output under the nearest values, divided
    by that under this rounding, over the calibration inputs. None if the weight has the nearest values, or it is unknown.
    """

    def __str__(self) -> str:
        return f"{self.name} in {dtypes.short_name(self.dtype)}: {with_error(self.score, self.error)}"


MOST_DRAWS = 100_000
"""Maximum number of backward passes for each sequence of a scan."""


@dataclass(frozen=True, slots=True)
class ScanReport:
    """The result of a scan: how much drift every castable weight causes in each scanned dtype."""

    model: str
    device: str
    reference: str
    inputs: str
    unit: str
    """The unit of the scores, from `unit_for`."""
    exact: bool
    """Whether each score was measured by a forward pass. Otherwise scores are estimated from backward passes."""
    draws: int
    """How many backward passes were run for each sequence."""
    sequences: int
    """How many of `all_sequences`, the sequences of the inputs, have been scanned."""
    all_sequences: int
    dtypes: tuple[str, ...]
    forward_seconds: float
    scan_seconds: float
    weights: tuple[WeightScore, ...]
    notices: tuple[str, ...] = ()
    activations: Literal["none", "weights"] = "none"
    """The setting `quantize_activations` with which the scan was made."""
    coverage: Coverage | None = None
    """How many of the model's tensors are in its files. None if no checkpoint was loaded."""
    loader: str = "own"
    """The program whose formats a search takes by default: "transformers" for a checkpoint of transformers, otherwise "own"."""
    experts: tuple[ExpertTokens, ...] = ()
    """How many tokens the experts of a mixture got, if they were counted."""

    def __repr__(self) -> str:
        names = {weight.name for weight in self.weights}
        how = "each measured alone" if self.exact else f"estimated, {self.draws} backward passes a sequence"
        most = max(self.weights, key=lambda weight: weight.score, default=None)
        return brief(
            f"ScanReport: {self.model} on {self.device} against {self.reference}",
            ("weights", f"{len(names):,} in {', '.join(map(dtypes.short_name, self.dtypes))}, {how}"),
            ("inputs", f"{self.sequences} of {plural(self.all_sequences, 'sequence')}: {self.inputs}"),
            ("most", "" if most is None else f"{most} {self.unit}"),
        )

    def scores(self) -> dict[tuple[str, str], float]:
        """Return the scores by (weight, dtype)."""
        return {(weight.name, weight.dtype): weight.score for weight in self.weights}

    def totals(self) -> list[tuple[float, str]]:
        """Return (sum of all weights' scores, dtype) for each dtype, smallest sum first."""
        scores: dict[str, list[float]] = {}
        for weight in self.weights:
            scores.setdefault(weight.dtype, []).append(weight.score)
        return sorted((math.fsum(scores[dtype]), dtype) for dtype in self.dtypes if dtype in scores)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The drift that a scan predicts for a recipe: the sum of the cast weights' scores."""

    value: float
    unit: str
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A recipe on the Pareto front of a search: its planned bytes and its predicted drift."""

    bytes: int
    predicted: float
    active_bytes: int | None = None
    """The bytes of weights that a token is expected to read, or None if they are unknown."""


def at_even_steps(points: Sequence[_Point], most: int) -> list[_Point]:
    """Return up to `most` of the points: the first, the last, and others at even steps between them."""
    count = min(most, len(points))
    return [points[round(step * (len(points) - 1) / max(1, count - 1))] for step in range(count)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe that a search measured because it is near the limit on bytes or drift."""

    planned_bytes: int
    predicted: float
    measured: float
    metrics: tuple[MetricChange, ...] = ()
    """The user's own metrics, such as an accuracy."""
    output: OutputDrift | None = None
    """The figures of the output."""


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The recipe that a search found, and all points of the Pareto front."""

    model: str
    unit: str
    rules: tuple[str, ...]
    stored_bytes: int
    planned_bytes: int
    """The bytes under the recipe. For the formats of llama.cpp, those in a GGUF file, where vectors are in float32."""
    predicted: float
    front: tuple[FrontPoint, ...]
    measured: float | None = None
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] = ()
    """The weights of which the recipe's casts make values infinite or zero, or clip them."""
    candidates: tuple[Candidate, ...] = ()
    """The recipes that the search measured. The best of them is the recipe of this report."""
    held_out: str | None = None
    """The inputs on which the candidates were measured."""
    metrics: tuple[MetricChange, ...] = ()
    """The user's own metrics under the recipe."""
    coverage: Coverage | None = None
    """How many of the model's tensors are in its files. None if no checkpoint was loaded."""
    context: int | None = None
    """The number of tokens in each sequence of the KV caches if the planned bytes include them, otherwise None."""
    cache_bytes: int = 0
    """The bytes of KV caches in `planned_bytes`."""
    formats: str = "own"
    """The program that loads an export of every point: "transformers", a runtime such as "vllm", or "own" for this program."""
    output: OutputDrift | None = None
    """The figures of the output under the recipe, or None if it was not measured."""
    active_bytes: int | None = None
    """The bytes of weights that a token is expected to read under the recipe, without KV caches, or None if they are unknown."""
    bandwidth: float | None = None
    """The bandwidth of the memory in bytes per second, if the user gives one. It gives the least time for `active_bytes`."""

    def __repr__(self) -> str:
        measured = "" if self.measured is None else f", measured {self.measured:.4e}"
        return brief(
            f"{type(self).__name__}: {self.model}, the best of {plural(len(self.front), 'point')} of the Pareto front",
            ("rules", ", ".join(self.rules) or "none: as stored"),
            ("memory", f"stored {human_bytes(self.stored_bytes)} → planned {human_bytes(self.planned_bytes)}"),
            ("drift", f"predicted {self.predicted:.4e}{measured} {self.unit}"),
        )
