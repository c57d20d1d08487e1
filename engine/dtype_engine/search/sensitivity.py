"""What a scan's scores say: of a node, of a layer, of a recipe.

Errors of different weights add up to second order, so the score of a node, a layer or a recipe is the sum of its weights'
own. They need not quite: that sum is always called predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.tree import Tree, ancestors, is_number, numbered_parts
from dtype_engine.recipe import Plan
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.scan import Prediction, ScanReport, WeightScore


def is_lossless(stored: str, dtype: str) -> bool:
    """Whether a weight costs nothing in `dtype`: it computes as the reference does, or wider."""
    reference = "float64" if stored == "float64" else "float32"
    return dtype in dtypes.COMPUTE_DTYPES and dtypes.BY_NAME[dtype].bits >= dtypes.BY_NAME[reference].bits


def scalar_drift(output: OutputDrift) -> float:
    """The one figure that scans and searches go by: KL where the output is a distribution, else relative L2 squared."""
    value = output.kl_mean if output.kl_mean is not None else output.rel_l2**2
    return value if math.isfinite(value) and not output.nonfinite else math.inf


def predict(tree: Tree, plan: Plan, report: ScanReport, scores: Mapping[tuple[str, str], float]) -> Prediction:
    """The drift of a plan by a scan: the sum of its weights' scores (`report.scores()`).

    Raises UserError when a weight was not scanned in its dtype.
    """
    total = 0.0
    for name, dtype in plan.dtypes.items():
        tensor = tree.tensors[name]
        if not (tensor.castable and tensor.persistent) or is_lossless(tensor.dtype, dtype):
            continue
        if (name, dtype) not in scores:
            raise UserError(f"{name} was not scanned in {dtype}: scan with it to predict this recipe")
        total += scores[name, dtype]
    return Prediction(total, report.unit, plan.planned_bytes)


def aggregate_by_node(tree: Tree, scores: Mapping[tuple[str, str], float], dtype: str) -> dict[str, float]:
    """The sum of the scores in `dtype` of all weights at or below each node: modules (the root is "") and weights. A tied
    weight counts once in each module that has it.
    """
    sums: dict[str, float] = {}
    for name, tensor in tree.tensors.items():
        score = scores.get((name, dtype))
        if score is None:
            continue
        above = {module for alias in tensor.names for module in ancestors(alias)}
        for node in {*tensor.names, *above, ""}:
            sums[node] = sums.get(node, 0.0) + score
    return sums


@dataclass(frozen=True, slots=True)
class Ranked:
    """A weight in a dtype, as the ranking has it. `saved`: bytes less than as stored, negative where it takes more."""

    score: WeightScore
    saved: int

    @property
    def per_byte(self) -> float:
        """Score a byte saved: infinity where none is."""
        return self.score.score / self.saved if self.saved > 0 else math.inf


def ranking(tree: Tree, report: ScanReport, dtype: str | None = None, per_byte: bool = False) -> list[Ranked]:
    """Those that cost anything, in one dtype or in all, what matters most first. By score per byte saved, those that save
    nothing come last.
    """
    rows = [
        Ranked(score, tree.tensors[score.name].nbytes - score.bytes)
        for score in report.weights
        if dtype in (None, score.dtype)
        and score.name in tree.tensors
        and not is_lossless(tree.tensors[score.name].dtype, score.dtype)
    ]
    if per_byte:
        rows.sort(key=lambda row: (row.saved <= 0, -row.per_byte, row.score.name))
    else:
        rows.sort(key=lambda row: (-row.score.score, row.score.name, row.score.dtype))
    return rows


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Scores by layer and kind of module: `cells` by (layer, kind). `rest`: weights that are in no numbered layer."""

    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    cells: Mapping[tuple[str, str], float]
    rest: tuple[tuple[str, float], ...]


def layer_map(tree: Tree, scores: Mapping[tuple[str, str], float], dtype: str) -> LayerMap:
    """Layers are what the first number in a name counts; a kind is what stands behind it, further numbers starred."""
    layers: dict[str, None] = {}
    kinds: dict[str, None] = {}
    cells: dict[tuple[str, str], float] = {}
    rest: list[tuple[str, float]] = []
    for name in tree.tensors:
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
