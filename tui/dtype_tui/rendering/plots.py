"""The base of all plots: the terminal's own colours only, and marks that differ without colour."""

from __future__ import annotations

from textual_plotext import PlotextPlot


class Plot(PlotextPlot):
    """A plot in the terminal's own foreground; its marks carry the meaning."""

    def __init__(self) -> None:
        super().__init__()
        # Both: the widget's theme counts when it is drawn, the plot's own when something is plotted before that.
        self.set_reactive(PlotextPlot.theme, "clear")
        self.plt.theme("clear")
