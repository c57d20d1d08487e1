"""The window that plots drift over the model's depth and lists the modules that cause the drift."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static

from dtype_engine.core.units import decibels
from dtype_engine.reports.text_drift import cause_label, causes_footing, causes_headline, share_words
from dtype_engine.results.attribution import AttributionReport
from dtype_engine.worker import events
from dtype_tui.rendering.canvas import Series, linear_axes, plot
from dtype_tui.rendering.cells import bar
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.engine_event import EngineEvent
from dtype_tui.screens.modal import ModalScreen
from dtype_tui.state.activity import Activity
from dtype_tui.state.depth import depth_label
from dtype_tui.state.experiment import Experiment

_MOST_ROWS = 200


class CausesScreen(ModalScreen[None]):
    """Plots the SQNR of every module's output in the order of the forward pass, in two series: under the whole recipe, and with
    only the module itself cast. A table lists the causes of the drift. stop: called to stop the measurement of causes.
    """

    DEFAULT_CSS = """
    CausesScreen { align: center middle; }
    CausesScreen > Vertical { width: 96%; max-width: 116; height: 94%; border: round $accent; padding: 0 1; background: $surface; }
    CausesScreen #plot { height: 2fr; min-height: 8; max-height: 16; }
    CausesScreen #legend { height: 1; }
    CausesScreen #headline { height: auto; }
    CausesScreen VerticalScroll { height: 3fr; scrollbar-size-vertical: 1; }
    CausesScreen VerticalScroll > Static { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,d", "leave", "Close, and stop the measurement of causes"),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
    ]

    def __init__(self, experiment: Experiment, activity: Activity, stop: Callable[[], None]) -> None:
        super().__init__()
        self._stop_causes = stop
        self._refused = False
        self._experiment = experiment
        self._activity = activity
        self._shown: AttributionReport | None = None

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Drift over depth"
            box.border_subtitle = "Esc closes"
            yield Static(id="legend", markup=False)
            yield Static(id="plot", markup=False)
            yield Static(id="headline", markup=False)
            with VerticalScroll():
                yield Static(id="causes", markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self.show_figures()

    def on_resize(self) -> None:
        self.call_after_refresh(self._plot)

    def show_figures(self) -> None:
        """Show the causes once they are measured. Until then, show the progress of the measurement."""
        report = self._experiment.results.causes
        if report is None:
            what, share = self._activity.now()
            words = f"{what}…"
            if not what:
                words = (
                    "No causes: they could not be measured."
                    if self._refused
                    else "Stopped: close this and press d again."
                )
            if share is not None:
                words = f"{what} {100 * share:3.0f} % {bar(share, 20)}"
            if what and "causes" in self._activity.waiting:
                words = f"The causes follow, after: {words}"
            self.query_one("#headline", Static).update(Text(words, style="dim"))
        elif report is not self._shown:
            self._shown = report
            headline = Text(causes_headline(report), style="bold")
            headline.append(f"\n{causes_footing(report)}", style="not bold dim")
            self.query_one("#headline", Static).update(headline)
            self.query_one("#causes", Static).update(_table(report))
            self._plot()

    def _plot(self) -> None:
        modules = self._experiment.results.modules
        report = self._experiment.results.causes
        local = {cause.name: cause.local_sqnr_db for cause in report.causes} if report is not None else {}
        names = [name for name in modules if name in local] if local else self._modules_with_weights()
        legend = Text("SQNR in dB of every module with weights, in order:  ⠒ as measured", style="dim")
        if local:
            legend = Text("SQNR in dB, modules in order:  ⠒ as measured  o its own error alone", style="dim")
        self.query_one("#legend", Static).update(legend)
        whole = [(float(index), _plot_y(modules[name].sqnr_db)) for index, name in enumerate(names)]
        own = [(float(index), _plot_y(local.get(name))) for index, name in enumerate(names)]
        labels = [depth_label(name) for name in names]
        starts = [
            (float(index), label)
            for index, label in enumerate(labels)
            if label not in labels[max(0, index - 1) : index]
        ]
        widget = self.query_one("#plot", Static)
        size = max(20, widget.size.width), max(4, widget.size.height)
        widget.update(plot((Series(whole), Series(own, "o", "bold")), linear_axes([*whole, *own]), *size, names=starts))

    def _modules_with_weights(self) -> list[str]:
        """Return the names of the measured modules that themselves hold tensors, in the order of the forward pass."""
        modules = self._experiment.tree.modules
        return [name for name in self._experiment.results.modules if name in modules and modules[name].tensors]

    def action_leave(self) -> None:
        if self._experiment.results.causes is None:
            self._stop_causes()
        self.dismiss()

    def on_engine_event(self, message: EngineEvent) -> None:
        match message.event:
            case events.Refused(job="causes"):
                self._refused = True
                self.show_figures()


def _plot_y(sqnr_db: float | None) -> float:
    """Return the SQNR as the plot's y, or NaN if it is unknown. The plot omits points with NaN, and points with infinity, which is
    the SQNR of modules without any drift.
    """
    return math.nan if sqnr_db is None else sqnr_db


def _table(report: AttributionReport) -> Table:
    table = PlainTable.grid(padding=(0, 2))
    table.add_column(overflow="ellipsis", no_wrap=True)
    for _ in range(2):
        table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_row("alone as cast", "drift", "of the whole", "", "own output", style="dim")
    for cause in report.causes[:_MOST_ROWS]:
        drawn = bar(cause.share, 6) if cause.share is not None and math.isfinite(cause.share) else ""
        drift = "not finite" if math.isinf(cause.drift) else f"{cause.drift:.2e}"
        local = "" if cause.local_sqnr_db is None else decibels(cause.local_sqnr_db)
        table.add_row(cause_label(cause), drift, share_words(cause), drawn, local)
    if len(report.causes) > _MOST_ROWS:
        table.add_row(f"and {len(report.causes) - _MOST_ROWS} more", "", "", "", "")
    return table
