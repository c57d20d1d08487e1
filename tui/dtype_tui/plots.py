"""What the plots have in common: the terminal's own colours only, and marks that differ without colour."""

from __future__ import annotations

from textual_plotext import PlotextPlot


class Plot(PlotextPlot):
    """A plot in the terminal's own foreground: whatever it means is said by its marks."""

    def on_mount(self) -> None:
        self.theme = "clear"
