"""The app's state of a scan: the scores known so far, and recipes with their predicted and measured drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_formats import SCANNED
from dtype_engine.core.units import percent
from dtype_tui.state.measurement_log import MOST_MEASURED

# The first paint does not need the search package, so it is imported where it is used.
if TYPE_CHECKING:
    from dtype_engine.core.options import RunSettings
    from dtype_engine.core.tree import Tree
    from dtype_engine.recipe import Plan, Recipe
    from dtype_engine.results.drift import DriftReport
    from dtype_engine.results.scan import Prediction, ScanReport
    from dtype_engine.search.constraints import SearchConstraints
    from dtype_engine.search.pareto import Constraints, ParetoFront

_DECADES = 3
"""Number of powers of ten that the bar of a score covers. The bar is full for the score of the whole model."""


class Point(msgspec.Struct, frozen=True):
    """A measured recipe with its measured and its predicted drift, in the unit of the scan's scores."""

    recipe: Recipe
    bytes: int
    """Planned bytes of the whole model."""
    predicted: float
    measured: float


class ScanState(msgspec.Struct, dict=True):
    report: ScanReport | None = None
    requested: tuple[str, ...] = ()
    """The dtypes of the scan, or () if none was requested."""
    running: bool = False
    finished: bool = False
    paused: bool = False
    lost: bool = False
    """Whether the engine ended before the scan. The next engine resumes the scan after the saved sequences."""
    dtype: str = ""
    """The dtype whose scores the screen shows."""
    measured: list[Point] = msgspec.field(default_factory=list)
    version: int = 0
    """Increases with every change that may have to be drawn."""
    nodes: dict[str, float] = msgspec.field(default_factory=dict)
    """The sum of the scores at or below each node, by name, for `dtype`."""
    scores: Mapping[tuple[str, str], float] = msgspec.field(default_factory=dict)
    """The drift if only this weight is cast to this dtype, by (weight, dtype)."""
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
    def has_caches(self) -> bool:
        return self.report is not None and any(each.startswith(SCANNED) for each in self.report.dtypes)

    @property
    def progress_words(self) -> str:
        """A phrase about an unfinished scan, such as `from a stopped scan (24 %)`, or ""."""
        if self.report is None or self.finished:
            return ""
        share = percent(self.report.sequences / self.report.all_sequences) if self.report.all_sequences else "0"
        return f"from a running scan ({share} %)" if self.running else f"from a stopped scan ({share} %)"

    def clear(self) -> None:
        """Drop the results. Called before a scan of other dtypes or on other inputs."""
        self.report, self.requested, self.nodes, self.scores, self.lost = None, (), {}, {}, False
        self.finished = False
        self.measured.clear()
        self.version += 1

    def begin(self, dtypes: tuple[str, ...]) -> None:
        self.requested, self.running, self.finished, self.lost = dtypes, True, False, False

    def lose(self) -> bool:
        """Record that the engine has ended. Returns whether the user is to be told that this left a scan unfinished."""
        self.running = self.paused = False
        news = bool(self.requested) and not self.finished and not self.lost
        self.lost = self.lost or news
        self.version += 1
        return news

    def stopped(self) -> None:
        self.running = self.paused = False
        self.version += 1

    @cached_property
    def limits(self) -> SearchConstraints:
        """What the user requires of the recipes on the Pareto front."""
        from dtype_engine.search.constraints import SearchConstraints

        return SearchConstraints()

    def prediction(self, tree: Tree, plan: Plan) -> Prediction | None:
        """Return the predicted drift of a plan, or None if its dtypes were not scanned."""
        if self.report is None:
            return None
        known = self._predicted  # another thread may replace it
        if known is None or known[0] is not plan or known[1] != self.version:
            from dtype_engine.search.sensitivity import predict

            try:
                prediction = predict(tree, plan, self.report, self.scores)
            except UserError:
                prediction = None
            self._predicted = known = (plan, self.version, prediction)
        return known[2]

    def predicted(self, tree: Tree, plan: Plan) -> str:
        """Return the predicted drift as text, such as `1.2e-03 nats per token`, or "" if it is unknown or there are no rules."""
        prediction = self.prediction(tree, plan)
        if prediction is None or not plan.recipe.rules:
            return ""
        drift = "not finite" if math.isinf(prediction.value) else figure(prediction.value)
        return f"{drift} {prediction.unit}" + ("" if self.finished else " so far")

    def why_stale(self, inputs: str, settings: RunSettings) -> str:
        """Return why the scan does not apply to these inputs and settings, or "" if it does."""
        report = self.report
        if report is not None and report.inputs != inputs:
            return "the inputs differ from those of the scan"
        if report is not None and report.activations != settings.quantize_activations:
            were = "not quantized" if report.activations == "none" else "quantized"
            return f"activations were {were} in the scan, unlike now"
        return ""

    def front(self, tree: Tree, context: int | None = None, batch: int = 1) -> ParetoFront:
        """Return the Pareto front within the user's constraints. Raises UserError if no plan meets them. If the scan includes
        formats of KV caches, the bytes of KV caches count, too, for `batch` sequences of `context` tokens.
        """
        from dtype_engine.search.pareto import make_front

        return make_front(tree, self.scores, self.constraints(context, batch))

    def constraints(self, context: int | None = None, batch: int = 1) -> Constraints:
        """Return the user's constraints, with the program that loads the model if the user names none. The arguments are those of
        `front`.
        """
        constraints = self.limits.constraints
        constraints = replace(constraints, formats=constraints.formats or (self.report.loader if self.report else ""))
        return replace(constraints, context=context, batch=batch) if self.has_caches else constraints

    def note_measured(self, tree: Tree, plan: Plan, report: DriftReport) -> None:
        """Store the measured drift of a plan beside its predicted drift, if the scan predicts one."""
        from dtype_engine.search.sensitivity import scalar_drift

        predicted = self.prediction(tree, plan)
        if predicted is None or not plan.recipe.rules:
            return
        self.measured = [point for point in self.measured if point.recipe != plan.recipe][1 - MOST_MEASURED :]
        self.measured.append(Point(plan.recipe, plan.planned_bytes, predicted.value, scalar_drift(report.output)))
        self.version += 1

    def cell(self, nodes: Sequence[str]) -> tuple[str, float]:
        """Return the sum of the scores of nodes as text, and its `heat`, or ("", 0.0) if no node has a score."""
        scores = [self.nodes[node] for node in nodes if node in self.nodes]
        return (figure(sum(scores)), self.heat(sum(scores))) if scores else ("", 0.0)

    def heat(self, score: float) -> float:
        """Return a score on a logarithmic scale: 1 for the score of the whole model, 0 for a thousandth of this score or less."""
        finite = [value for name, value in self.nodes.items() if name == "" and math.isfinite(value)]
        whole = finite[0] if finite else max((v for v in self.nodes.values() if math.isfinite(v)), default=0.0)
        if math.isinf(score):
            return 1.0
        if score <= 0 or whole <= 0:
            return 0.0
        return max(0.0, min(1.0, 1 + math.log10(score / whole) / _DECADES))

    @property
    def heading(self) -> str:
        in_nats = self.report is not None and "nats" in self.report.unit
        return f"{'nats ' if in_nats else ''}{dtypes.short_name(self.dtype)}"


def figure(value: float) -> str:
    """Return a scan's score as text of at most eight cells."""
    return "inf" if math.isinf(value) else "0" if value == 0 else f"{value:.1e}"
