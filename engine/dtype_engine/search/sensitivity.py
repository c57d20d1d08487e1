"""Adds up the scores of a scan: the drifts of the output if only one weight is cast.

To second order, the errors of different weights add up, so the score of a node, a layer or a recipe is the sum of its weights'
scores. This sum is an approximation, and therefore always called predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_cache import STATES
from dtype_engine.core.kv_formats import SCANNED
from dtype_engine.core.tree import Tree, ancestors, is_number, numbered_parts
from dtype_engine.recipe import Plan
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.scan import Prediction, ScanReport, WeightScore


def is_lossless(stored: str, dtype: str) -> bool:
    """Return whether casting a weight from the dtype `stored` to `dtype` leaves the output equal to the reference's.

    The reference computes in float64 with a weight stored in float64, and in float32 with all others. bfloat16 changes the output
    even for a weight stored in it, because operations then round to bfloat16.
    """
    reference = "float64" if stored == "float64" else "float32"
    return dtype in dtypes.COMPUTE_DTYPES and dtypes.BY_NAME[dtype].bits >= dtypes.BY_NAME[reference].bits


def scalar_drift(output: OutputDrift) -> float:
    """Return a model output's drift as one number: the mean KL divergence if the output is a distribution, otherwise the squared
    relative L2 error. It is infinite if the output has NaN or infinite values.
    """
    value = output.kl_mean if output.kl_mean is not None else (output.rel_l2 or 0.0) ** 2
    return value if math.isfinite(value) and not output.nonfinite else math.inf


def predict(tree: Tree, plan: Plan, report: ScanReport, scores: Mapping[tuple[str, str], float]) -> Prediction:
    """Return the predicted drift of a plan. scores: `report.scores()`. Raises UserError if a planned dtype has no score."""
    total = 0.0
    for name, dtype in plan.dtypes.items():
        tensor = tree.tensors[name]
        if not (tensor.castable and tensor.persistent) or name in tree.of_draft:
            continue
        if (name, dtype) not in scores:
            if is_lossless(tensor.dtype, dtype):
                continue
            raise UserError(f"{name} was not scanned in {dtype}: scan with it to predict this recipe")
        total += scores[name, dtype]
    for name, form in plan.caches.items():
        if name.endswith(STATES):
            raise UserError(
                f"{name} in {form} has no score, since a scan does not score recurrent states: measure the drift"
            )
        if (name, SCANNED + form) not in scores:
            raise UserError(f"{name} was not scanned in {form}: scan with {SCANNED}{form} to predict this recipe")
        total += scores[name, SCANNED + form]
    return Prediction(total, report.unit, plan.planned_bytes)


def aggregate_by_node(tree: Tree, scores: Mapping[tuple[str, str], float], dtype: str) -> dict[str, float]:
    """Return the sum of the scores in `dtype` of all weights at or below each node of the tree, by the node's name. A node is a
    module (the root is "") or a weight. A weight that several modules share counts once in each of them. scores: the drift by
    (weight, dtype).
    """
    sums: dict[str, float] = {}
    every = {name: tensor.names for name, tensor in tree.tensors.items()} | {name: (name,) for name in tree.caches}
    for name, names in every.items():
        score = scores.get((name, dtype))
        if score is None:
            continue
        above = {module for alias in names for module in ancestors(alias)}
        for node in {*names, *above, ""}:
            sums[node] = sums.get(node, 0.0) + score
    return sums


@dataclass(frozen=True, slots=True)
class Ranked:
    """A cast of one weight to one dtype, and the drift that it causes."""

    score: WeightScore
    saved: int
    """How many bytes the cast saves; negative if the weight becomes larger."""

    @property
    def per_byte(self) -> float:
        """The drift for each saved byte, or infinity if the cast saves no bytes."""
        return self.score.score / self.saved if self.saved > 0 else math.inf


def ranking(tree: Tree, report: ScanReport, dtype: str | None = None, per_byte: bool = False) -> list[Ranked]:
    """Return the casts to `dtype`, or to all dtypes if it is None, that a scan has scored, the highest drift first. Casts that lose
    nothing are left out. per_byte: sort by drift per saved byte, with casts that save nothing last.
    """
    widest = {score.name: score.bytes for score in sorted(report.weights, key=lambda each: each.bytes)}
    rows = [
        Ranked(
            score, (tree.tensors[score.name].nbytes if score.name in tree.tensors else widest[score.name]) - score.bytes
        )
        for score in report.weights
        if dtype in (None, score.dtype)
        and (score.name in tree.caches or score.name in tree.tensors)
        and not (score.name in tree.tensors and is_lossless(tree.tensors[score.name].dtype, score.dtype))
    ]
    if per_byte:
        rows.sort(key=lambda row: (row.saved <= 0, -row.per_byte, row.score.name))
    else:
        rows.sort(key=lambda row: (-row.score.score, row.score.name, row.score.dtype))
    return rows


@dataclass(frozen=True, slots=True)
class LayerMap:
    """The scores in one dtype as a table: a row for each layer, such as `model.layers.3`, a column for each kind of weight."""

    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    cells: Mapping[tuple[str, str], float]
    """The sum of the scores of the weights in each cell, by (layer, kind of weight)."""
    rest: tuple[tuple[str, float], ...]
    """(name, score) of each weight whose name has no layer number."""


def layer_map(tree: Tree, scores: Mapping[tuple[str, str], float], dtype: str) -> LayerMap:
    """Return the scores in `dtype` as a table. A weight's layer is its name up to the first number. Its kind is the rest of its
    name, with `*` for further numbers. scores: the drift by (weight, dtype).
    """
    layers: dict[str, None] = {}
    kinds: dict[str, None] = {}
    cells: dict[tuple[str, str], float] = {}
    rest: list[tuple[str, float]] = []
    for name in (*tree.tensors, *tree.caches):
        score = scores.get((name, dtype))
        if score is None:
            continue
        parts, numbered = name.split("."), numbered_parts(name)
        if not numbered or numbered[0] == len(parts) - 1:
            rest.append((name, score))
            continue
        index = numbered[0]
        layer = ".".join(parts[: index + 1])
        kind = ".".join("*" if is_number(part) else part for part in parts[index + 1 :]).removesuffix(".weight")
        layers[layer] = kinds[kind] = None
        cells[layer, kind] = cells.get((layer, kind), 0.0) + score
    return LayerMap(tuple(layers), tuple(kinds), cells, tuple(rest))
