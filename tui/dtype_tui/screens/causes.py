"""The window that plots drift over the model's depth and lists the modules that cause the drift."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.geometry import Region
from textual.widgets import Static

from dtype_engine.core.units import decibels
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.reports.text_drift import cause_label, causes_footing, causes_headline, share_words
from dtype_engine.results.attribution import AttributionReport, Contribution
from dtype_engine.service import events
from dtype_engine.service.commands import Cancel
from dtype_engine.service.jobs import CAUSES
from dtype_tui.rendering.canvas import Series, linear_axes, plot
from dtype_tui.rendering.cells import bar
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.choice import ChoiceScreen
from dtype_tui.screens.engine_event import EngineEvent
from dtype_tui.state.controller import Controller
from dtype_tui.state.depth import depth_label
from dtype_tui.state.node_rules import reference_rule
from dtype_tui.state.results import Results
from dtype_tui.widgets.cursor import cursor_style

_MOST_ROWS = 200
_STOPPED = "Stopped: close this and press d to go on."


class CausesScreen(ChoiceScreen[str]):
    """Plots the SQNR of every module's output, under the whole recipe and with only the module itself cast. Lists the causes of the
    drift as they are found. The window's result is the name of a module for the tree to go to.
    """

    HEADING = "Drift over depth"

    DEFAULT_CSS = """
    CausesScreen { align: center middle; }
    CausesScreen > Vertical { width: 96%; max-width: 116; height: 94%; border: round $accent; padding: 0 1; background: $surface; }
    CausesScreen #plot { height: 2fr; min-height: 8; max-height: 16; }
    CausesScreen #legend { height: 1; }
    CausesScreen #headline { height: auto; }
    CausesScreen VerticalScroll { height: 3fr; scrollbar-size-vertical: 1; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "The module above"),
        Binding("down,j", "move(1)", "The module below"),
        Binding("pageup,ctrl+b", "page(-1)", "Ten modules up"),
        Binding("pagedown,ctrl+f", "page(1)", "Ten modules down"),
        Binding("enter", "go", "Go to the module in the tree"),
        Binding("x", "put_back", "Put the module back to the reference's dtype"),
        Binding("u", "undo", "Undo"),
        Binding("escape", "leave", "Stop measuring and keep the causes found so far; then close"),
        Binding("q,d", "close_and_stop", "Close, and stop the measurement of causes"),
    ]

    def __init__(self, controller: Controller) -> None:
        super().__init__(1)
        self._controller = controller
        self._experiment = controller.experiment
        self._ended = ""
        """Why the measurement of causes ended early, or "" if it did not."""
        self._before: tuple[Recipe, Results] | None = None
        """The recipe and the results from before the user changed the recipe here, shown until the new causes are known."""
        self._chosen: str | None = None
        """The module under the cursor, or None until the user moves the cursor, which stays at the top until then."""
        self._drawn: tuple[AttributionReport, Recipe] | None = None

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(id="legend", markup=False)
            yield Static(id="plot", markup=False)
            yield Static(id="headline", markup=False)
            with VerticalScroll(can_focus=False):
                yield Static(id="causes", markup=False)

    def on_mount(self) -> None:
        self.show_figures()

    def on_resize(self) -> None:
        self.call_after_refresh(self._plot)

    # -- what is shown -------------------------------------------------------------------------------------------

    @property
    def _results(self) -> Results:
        now = self._experiment.results
        return now if now.causes is not None or self._before is None else self._before[1]

    @property
    def _report(self) -> AttributionReport | None:
        """The causes to show: all of them, or those found so far."""
        results = self._results
        return results.causes or (results.partial_causes.report if results.partial_causes is not None else None)

    @property
    def _rows(self) -> tuple[Contribution, ...]:
        return self._report.causes[:_MOST_ROWS] if self._report is not None else ()

    @property
    def _measuring(self) -> bool:
        return self._experiment.results.causes is None and not self._ended and self._controller.activity.busy

    def show_figures(self) -> None:
        self._show_title()
        report = self._report
        if report is None:
            self.query_one("#headline", Static).update(Text(self._progress(), style="dim"))
            return
        headline = Text(causes_headline(report), style="bold")
        footing = causes_footing(report)
        if self._experiment.results.causes is None:
            headline = Text(f"{'So far' if self._before is None else 'Before'}: ", style="bold") + headline
            footing = self._progress()
        headline.append(f"\n{footing}", style="not bold dim")
        self.query_one("#headline", Static).update(headline)
        if (report, self._experiment.recipe) != self._drawn:
            self._drawn = report, self._experiment.recipe
            names = [cause.name for cause in self._rows]
            self._count = max(1, len(names))
            self.index = names.index(self._chosen) if self._chosen in names else min(self.index, self._count - 1)
            self.redraw()
            self._plot()

    def _show_title(self) -> None:
        box, results = self.query_one(Vertical), self._experiment.results
        box.border_title = self.HEADING
        if results.causes is None and (found := results.partial_causes) is not None:
            stopped = "" if self._measuring else "stopped after "
            box.border_title = f"{self.HEADING}: {stopped}{found.done} of {found.total}"
        stops = self._measuring and self._before is None and self._report is not None
        esc = "stops" if stops else "closes"
        box.border_subtitle = f"↑↓ choose  Enter goes there  x puts back  u undoes  Esc {esc}"

    def _progress(self) -> str:
        activity = self._controller.activity
        what, share = activity.now()
        if self._ended or not what:
            return self._ended or _STOPPED
        words = f"{what}…" if share is None else f"{what} {100 * share:3.0f} % {bar(share, 20)}"
        return f"The causes follow, after: {words}" if "causes" in activity.waiting else words

    def draw(self) -> Table:
        table = PlainTable.grid(padding=(0, 2))
        table.add_column(overflow="ellipsis", no_wrap=True)
        for _ in range(2):
            table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        table.add_row("  alone as cast", "drift", "share", "", "own output", style="dim")
        tree, reference = self._experiment.tree, self._experiment.model.reference
        added: set[Rule] = set()
        if self._before is not None and self._results is self._before[1]:
            added = set(self._experiment.recipe.rules[len(self._before[0]) :])
        for index, cause in enumerate(self._rows):
            put_back = bool(added) and reference_rule(tree, cause.name, reference) in added
            drawn = bar(cause.share, 6) if cause.share is not None and math.isfinite(cause.share) else ""
            drift = "not finite" if math.isinf(cause.drift) else f"{cause.drift:.2e}"
            local = "" if cause.local_sqnr_db is None else decibels(cause.local_sqnr_db)
            name = Text.assemble(self.marker(index), cause_label(cause))
            words = "put back" if put_back else drawn
            style = cursor_style(self) if index == self.index else Style()
            table.add_row(name, drift, share_words(cause), words, local, style=style + Style(dim=put_back))
        more = len(self._report.causes) - _MOST_ROWS if self._report is not None else 0
        if more > 0:
            table.add_row(f"  and {more} more", "", "", "", "")
        return table

    def redraw(self) -> None:
        super().redraw()
        line = self.index + 1 if self.index else 0  # the heading of the table is above the first module
        region = Region(0, line, 1, 1)
        self.call_after_refresh(self.query_one(VerticalScroll).scroll_to_region, region, animate=False)

    def _plot(self) -> None:
        modules = self._results.modules
        local = {cause.name: cause.local_sqnr_db for cause in self._rows}
        known = self._experiment.tree.modules
        names = [name for name in modules if name in known and known[name].tensors]
        if self._results.causes is not None and local:
            names = [name for name in modules if name in local]
        legend = Text("SQNR in dB of every module with weights, in order:  ⠒ as measured", style="dim")
        if local:
            legend = Text("SQNR in dB, modules in order:  ⠒ as measured  o its own error alone", style="dim")
        self.query_one("#legend", Static).update(legend)
        whole = [(float(index), _plot_y(modules[name].sqnr_db)) for index, name in enumerate(names)]
        own = [(float(index), _plot_y(local.get(name))) for index, name in enumerate(names)]
        labels = [depth_label(name) for name in names]
        starts = [(float(at), label) for at, label in enumerate(labels) if label not in labels[max(0, at - 1) : at]]
        widget = self.query_one("#plot", Static)
        size = max(20, widget.size.width), max(4, widget.size.height)
        widget.update(plot((Series(whole), Series(own, "o", "bold")), linear_axes([*whole, *own]), *size, names=starts))

    # -- keys and events -----------------------------------------------------------------------------------------

    def action_move(self, step: int) -> None:
        super().action_move(step)
        self._chosen = self._rows[self.index].name if self._rows else None

    def action_page(self, pages: int) -> None:
        self.action_move(min(max(self.index + 10 * pages, 0), self._count - 1) - self.index)

    def action_go(self) -> None:
        if self._rows:
            self._close(self._rows[self.index].name)

    def action_put_back(self) -> None:
        if self._rows:
            name = self._rows[self.index].name
            self._change(lambda: self._controller.put_back(name))

    def action_undo(self) -> None:
        self._change(self._controller.undo)

    def _change(self, change: Callable[[], None]) -> None:
        """Change the recipe by calling `change`, and measure the causes of the new recipe's drift unless they are known."""
        experiment = self._experiment
        recipe, results = experiment.recipe, self._results
        change()
        if experiment.recipe == recipe:
            return
        self._before = self._before or (recipe, results)
        if experiment.results.causes is None:
            self._ended = ""
            self._controller.ask(CAUSES.ask(None))
        else:
            self._before = None
            self._stop()
        self.show_figures()

    def action_leave(self) -> None:
        if self._measuring and self._before is None and self._report is not None:
            self._stop()
            self._ended = _STOPPED
            self.show_figures()
        else:
            self._close()

    def action_close_and_stop(self) -> None:
        self._close()

    def _close(self, module: str | None = None) -> None:
        if self._experiment.results.causes is None:
            self._stop()
        self.dismiss(module)

    def _stop(self) -> None:
        self._controller.engine.request(Cancel("causes"))

    def on_engine_event(self, message: EngineEvent) -> None:
        match message.event:
            case events.Refused(job="causes"):
                self._ended = "No causes: they could not be measured."
            case events.Stopped(job="causes"):
                self._ended = _STOPPED
            case _:
                return
        self.show_figures()


def _plot_y(sqnr_db: float | None) -> float:
    """Return an SQNR as the y of a point: NaN for None. The plot omits NaN, and infinity, which means no drift."""
    return math.nan if sqnr_db is None else sqnr_db
