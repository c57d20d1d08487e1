"""The plot of the measured recipes, drift against bytes, on wide screens."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from dtype_engine.core.text import printable
from dtype_tui.rendering.palette import ACCENT
from dtype_tui.widgets.panes.base import Pane


class TradeOffPane(Pane):
    """Plots the drift of the measured recipes against their bytes, if there are at least two, and marks the current recipe."""

    TITLE = "Bytes and drift"
    CORNER = "H history"
    HELP = (
        "The measured recipes: planned bytes to the right, KL upwards, or the square of the relative L2 error if the output is no "
        "distribution. ● is the current recipe, P the baseline. H lists them."
    )

    def draw(self, activity: str, node: str) -> RenderableType:
        entries = self.experiment.measured
        from dtype_tui.rendering.canvas import Series, axes_around, linear_axes, plot  # the first paint plots nothing

        axis = self.experiment.axis
        distribution = any(entry.output.kl_mean is not None for entry in entries)
        series = []
        for entry in entries:
            drift = entry.height(axis, distribution)
            if drift is None:
                continue
            current = (entry.recipe, entry.settings) == (self.experiment.recipe, self.experiment.settings)
            mark = "●" if current else "P" if self.experiment.is_baseline(entry) else "○"
            series.append(Series(((entry.planned_bytes / 2**20, drift),), mark, f"bold {ACCENT}" if current else ""))
        if len(series) < 2:
            return Text("Needs two measured recipes.", "dim")
        series.sort(key=lambda each: each.mark == "●")  # the current recipe is drawn over the others
        points = [point for each in series for point in each.points]
        axes = linear_axes(points) if axis else axes_around(points)
        drawn = plot(series, axes, self.columns, max(4, self.lines - 1))
        unit = printable(axis, 40) or ("KL, nats" if distribution else "relative squared error")
        return Group(drawn, Text(f"across: planned MiB, up: {unit}", "dim"))
