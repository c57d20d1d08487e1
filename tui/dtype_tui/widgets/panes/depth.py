"""The plot of drift over the model's depth, below the tree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree, ancestors
from dtype_engine.core.units import decibels
from dtype_tui.rendering.palette import ramp, sqnr_colour
from dtype_tui.state.depth import depth_label, depth_modules
from dtype_tui.widgets.panes.base import Pane

# The first paint plots nothing, so what plots is imported where it is used.
if TYPE_CHECKING:
    from dtype_engine.results.drift import ModuleDrift
    from dtype_tui.rendering.canvas import Note
    from dtype_tui.state.experiment import Experiment

_LOWER_SHARE = 0.12
"""Fraction of the vertical axis below the smallest SQNR, as room for the note about the worst module."""
_NO_DRIFT_DB = 120.0
"""The rounding of float32 itself moves outputs by about this much, and a line up to it would leave the others no height."""


class DepthPane(Pane):
    """Plots the SQNR of the layers in order of depth, in colors for its rating, and marks the module that drifts most. A dim line
    shows the baseline recipe or, if there is none, the recipe before the current one.
    """

    TITLE = "Drift over depth"
    CORNER = "d causes  w worst"
    HELP = (
        "SQNR of the output of each layer, of the embedding, the last norm and the head, in the order of the forward pass; of a "
        "model without numbered layers, of its topmost modules. ○ is the module that drifts most, joined to the layer that "
        "contains it. The dim line is the baseline (P in the history) or else the recipe before. Layers that do not drift are left "
        f"out, and beside larger drifts those above {_NO_DRIFT_DB:.0f} dB, which the rounding of float32 reaches."
    )

    def __init__(self, experiment: Experiment, id: str) -> None:
        super().__init__(experiment, id)
        self._tree: Tree | None = None
        self._names: list[str] = []
        """The names of the modules in the plot: the model's layers or, without numbered layers, its topmost modules."""
        self._order: Mapping[str, int] = {}
        """The position of each measured module in the forward pass, by its name."""

    def draw(self, activity: str, node: str) -> Text:
        now, other = self.experiment.results.modules, self._other_modules()
        names = self._modules()
        drifts = [now.get(name) for name in names]
        before = [other.get(name) for name in names]
        # Only beside larger drifts: from float64 to float32, all are of this size.
        most = _NO_DRIFT_DB if any(_sqnr(drift) < _NO_DRIFT_DB for drift in (*drifts, *before)) else math.inf
        whole = [(float(place), _sqnr(drift, most)) for place, drift in enumerate(drifts)]
        dim = [(float(place), _sqnr(drift, most)) for place, drift in enumerate(before)]
        if not any(math.isfinite(y) for _, y in (*whole, *dim)):
            nothing = bool(now) and self.experiment.results.report is not None
            return Text(
                "No layer drifts." if nothing else "The drift of each layer appears when it is measured.", "dim"
            )
        from dtype_tui.rendering.canvas import Axes, Series, linear_axes, plot

        notes = self._worst_note(names, whole)
        fitted = linear_axes([*whole, *dim, *((note.x, note.y) for note in notes)])
        low = fitted.low - _LOWER_SHARE * (fitted.high - fitted.low)
        axes = Axes(0.0, max(1.0, len(names) - 1.0), low, fitted.high, zero=False, linear=True)
        limits = self.experiment.results.sqnr_limits
        stems = [((note.x, whole[int(note.x)][1]), (note.x, note.y)) for note in notes]
        series = [
            *(Series(stem, style=sqnr_colour(stem[1][1], limits)) for stem in stems),
            Series(dim, style="dim"),
            Series(whole, styles=[sqnr_colour(y, limits) if math.isfinite(y) else "" for _, y in whole]),
        ]
        broken = [(x, axes.low) for (x, _), drift in zip(whole, drifts, strict=True) if drift and not drift.is_finite]
        series.append(Series(broken, "✗", ramp("broken")))
        series += [Series([(note.x, note.y)], "○", "bold") for note in notes]
        labels = [(float(place), depth_label(name)) for place, name in enumerate(names)]
        return plot(series, axes, self.columns, max(4, self.lines), names=labels, unit="dB", notes=notes)

    def _modules(self) -> list[str]:
        """Return the names of the modules in the plot: in the order of the forward pass, if it is known."""
        tree, report = self.experiment.tree, self.experiment.results.report
        if tree is not self._tree:
            self._tree, self._names, self._order = tree, depth_modules(tree), {}
        if report is not None and not self._order:
            self._order = {drift.name: place for place, drift in enumerate(report.modules)}
            measured = [name for name in self._names if name in self._order]
            self._names = sorted(measured, key=lambda name: self._order[name])
        return self._names

    def _other_modules(self) -> Mapping[str, ModuleDrift]:
        """Return the drift of the modules, by name, under the baseline or, without one, the recipe before the current one."""
        if self.experiment.baseline is not None:
            return self.experiment.baseline_modules
        before = self.experiment.before
        return {drift.name: drift for drift in before.modules} if before is not None else {}

    def _worst_note(self, names: Sequence[str], whole: Sequence[tuple[float, float]]) -> Sequence[Note]:
        """Return a note about the module that drifts most, if any. Its x is that of the layer that contains the module; its y is
        the module's own SQNR. names: the layers in the plot. whole: their points.
        """
        worst = self.experiment.results.worst_modules(1)
        if not worst or not worst[0].is_finite:
            return ()
        name = worst[0].name
        place = next((names.index(above) for above in (name, *ancestors(name)) if above in names), None)
        if place is None or not math.isfinite(whole[place][1]):
            return ()
        from dtype_tui.rendering.canvas import Note

        layer = names[place]
        inside = printable(name[len(layer) :].strip("."), 60)
        words = " ".join(part for part in (depth_label(layer), inside) if part)
        return (Note(whole[place][0], _sqnr(worst[0]), f"▲ {words}  {decibels(worst[0].sqnr_db)}", "bold"),)


def _sqnr(drift: ModuleDrift | None, most: float = math.inf) -> float:
    """Return a module's SQNR in dB: NaN if it is unknown or the output is not finite, infinite if the module does not drift or has
    an SQNR of at least `most`.
    """
    if drift is None or not drift.is_finite or drift.sqnr_db is None:
        return math.nan
    return drift.sqnr_db if drift.sqnr_db < most else math.inf
