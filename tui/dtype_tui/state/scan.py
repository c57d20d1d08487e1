"""What the app keeps of a scan: the estimates so far, the dtype that is shown, what was predicted and what measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.units import percent
from dtype_tui.rendering.cells import bar

# Searching is not for the first paint: its rooms are imported where they are needed.
if TYPE_CHECKING:
    from dtype_engine.core.options import RunSettings
    from dtype_engine.core.tree import Tree
    from dtype_engine.recipe import Plan, Recipe
    from dtype_engine.results.drift import DriftReport
    from dtype_engine.results.scan import Prediction, ScanReport
    from dtype_engine.search.constraints import SearchConstraints
    from dtype_engine.search.pareto import ParetoFront

_DECADES = 3
"""The heat bar is empty at this many powers of ten under the whole model."""


@dataclass(frozen=True, slots=True)
class Point:
    """A recipe that was measured: bytes planned, drift predicted and measured."""

    recipe: Recipe
    bytes: int
    predicted: float
    measured: float


@dataclass
class ScanState:
    """One model's scan. `version` grows with all that a screen may show."""

    report: ScanReport | None = None
    asked: tuple[str, ...] = ()
    running: bool = False
    finished: bool = False
    paused: bool = False
    lost: bool = False
    """It is of an engine that is gone, and was not finished: the next one goes on with what was kept."""
    dtype: str = ""
    measured: list[Point] = field(default_factory=list)
    version: int = 0
    nodes: dict[str, float] = field(default_factory=dict)
    scores: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By (weight, dtype)."""
    _predicted: tuple[Plan, int, Prediction | None] | None = None

    def set_report(self, tree: Tree, report: ScanReport, finished: bool) -> None:
        self.report, self.finished, self.running = report, finished, not finished
        self.scores = report.scores()
        if self.dtype not in report.dtypes:
            self.dtype = report.dtypes[0]
        self.show_dtype(tree, self.dtype)

    def show_dtype(self, tree: Tree, dtype: str) -> None:
        self.dtype = dtype
        from dtype_engine.search.sensitivity import aggregate_by_node

        self.nodes = aggregate_by_node(tree, self.scores, dtype)
        self.version += 1

    @property
    def progress_words(self) -> str:
        """`from a stopped scan (24 %)`, while not all sequences have gone by; "" once they have."""
        if self.report is None or self.finished:
            return ""
        share = percent(self.report.sequences / self.report.all_sequences) if self.report.all_sequences else "0"
        return f"from a scan under way ({share} %)" if self.running else f"from a stopped scan ({share} %)"

    def clear(self) -> None:
        """A scan of other dtypes or inputs takes its place."""
        self.report, self.asked, self.nodes, self.scores, self.lost = None, (), {}, {}, False
        self.measured.clear()
        self.version += 1

    def begin(self, dtypes: tuple[str, ...]) -> None:
        """The engine was asked to scan in these dtypes, or to go on."""
        self.asked, self.running, self.finished, self.lost = dtypes, True, False, False

    def lose(self) -> bool:
        """The engine that scans is gone: what there is stays to be seen. True where that is news."""
        self.running = self.paused = False
        news = bool(self.asked) and not self.finished and not self.lost
        self.lost = self.lost or news
        self.version += 1
        return news

    def stopped(self) -> None:
        """The engine is not scanning any more."""
        self.running = self.paused = False
        self.version += 1

    @cached_property
    def limits(self) -> SearchConstraints:
        """What a search has to keep to."""
        from dtype_engine.search.constraints import SearchConstraints

        return SearchConstraints()

    def prediction(self, tree: Tree, plan: Plan) -> Prediction | None:
        """The drift that is predicted for a plan; None where it holds dtypes that were not scanned, or nothing was."""
        if self.report is None:
            return None
        if self._predicted is None or self._predicted[0] is not plan or self._predicted[1] != self.version:
            from dtype_engine.search.sensitivity import predict

            try:
                prediction = predict(tree, plan, self.report, self.scores)
            except UserError:
                prediction = None
            self._predicted = (plan, self.version, prediction)
        return self._predicted[2]

    def predicted(self, tree: Tree, plan: Plan) -> str:
        """`1.2e-03 nats per token`: the prediction in words; "" where there is none, or no rule."""
        prediction = self.prediction(tree, plan)
        if prediction is None or not plan.recipe.rules:
            return ""
        drift = "not finite" if math.isinf(prediction.value) else figure(prediction.value)
        return f"{drift} {prediction.unit}" + ("" if self.finished else ", scan under way")

    def why_stale(self, inputs: str, settings: RunSettings) -> str:
        """Why it says nothing of a run on these inputs with these settings, as the beginning of a sentence; "" where it does."""
        report = self.report
        if report is not None and report.inputs != inputs:
            return "the inputs are others than those of the scan"
        if report is not None and report.activations != settings.quantize_activations:
            were = "as they are" if report.activations == "none" else "quantised"
            return f"activations were {were} in the scan, and are not now"
        return ""

    def front(self, tree: Tree) -> ParetoFront:
        """The Pareto front within the limits. Raises UserError."""
        from dtype_engine.search.pareto import make_front

        return make_front(tree, self.scores, self.limits.constraints)

    def note_measured(self, tree: Tree, plan: Plan, report: DriftReport) -> None:
        """A recipe was measured: keep it beside what was predicted."""
        from dtype_engine.search.sensitivity import scalar_drift

        predicted = self.prediction(tree, plan)
        if predicted is None or not plan.recipe.rules:
            return
        self.measured = [point for point in self.measured if point.recipe != plan.recipe]
        self.measured.append(Point(plan.recipe, plan.planned_bytes, predicted.value, scalar_drift(report.output)))
        self.version += 1

    def cell(self, node: str) -> tuple[str, str, float]:
        """(score, bar, heat from 0 to 1) of a node in the dtype shown; heat is its share of the whole by powers of ten."""
        score = self.nodes.get(node)
        if score is None:
            return "", "", 0.0
        heat = self.heat(score)
        return figure(score), "!!!" if math.isinf(score) else bar(heat, 3), heat

    def heat(self, score: float) -> float:
        """From 0 (a 10 000th of the whole model, or less) to 1 (all of it)."""
        finite = [value for name, value in self.nodes.items() if name == "" and math.isfinite(value)]
        whole = finite[0] if finite else max((v for v in self.nodes.values() if math.isfinite(v)), default=0.0)
        if math.isinf(score):
            return 1.0
        if score <= 0 or whole <= 0:
            return 0.0
        return max(0.0, min(1.0, 1 + math.log10(score / whole) / _DECADES))

    @property
    def heading(self) -> str:
        """Over the tree's column."""
        return (
            f"nats {dtypes.short_name(self.dtype)}"
            if self.report and "nats" in self.report.unit
            else dtypes.short_name(self.dtype)
        )


def figure(value: float) -> str:
    """A score in at most eight cells."""
    return "inf" if math.isinf(value) else "0" if value == 0 else f"{value:.1e}"
