"""Every measured recipe: a table, a plot of bytes against drift, a comparison of two, and the way back to one."""

from __future__ import annotations

import math
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import DataTable, Static

from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, seconds_text
from dtype_engine.results.meaning import Meaning, meaning
from dtype_tui.rendering.cells import short_bytes, truncate
from dtype_tui.rendering.loss_text import loss_mark
from dtype_tui.rendering.plots import Plot
from dtype_tui.screens.modal import ModalScreen
from dtype_tui.screens.overlay import Overlay
from dtype_tui.state.experiment import Experiment
from dtype_tui.state.measurement_log import MeasuredRecipe, toggle_pin

_MARKS = "123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OTHER_MARK = "+"


class MeasurementsScreen(ModalScreen[MeasuredRecipe | None]):
    """The measured recipes. The result is the one to go back to, or None."""

    DEFAULT_CSS = """
    MeasurementsScreen { align: center middle; }
    MeasurementsScreen > Vertical { width: 96%; max-width: 116; height: 94%; border: round $accent; padding: 0 1;
        background: $surface; }
    MeasurementsScreen DataTable { height: 1fr; min-height: 5; scrollbar-size-vertical: 1; overflow-x: hidden; }
    MeasurementsScreen #rules { height: auto; max-height: 4; }
    MeasurementsScreen Plot { height: 1fr; min-height: 8; max-height: 16; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "go_back", "Go back to the recipe"),
        Binding("p", "pin", "Pin it: pinned ones come first"),
        Binding("c", "compare", "Compare: once on each of two"),
        Binding("j", "move(1)", "Down", show=False),
        Binding("k", "move(-1)", "Up", show=False),
        Binding("escape,q,H", "leave", "Close"),
    ]

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        self._experiment = experiment
        self._chosen: int | None = None
        self._order: list[int] = []

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Measured recipes"
            box.border_subtitle = "Enter goes back  p pins  c compares two  Esc closes"
            yield DataTable(cursor_type="row", zebra_stripes=False)
            yield Static(id="rules", markup=False)
            yield Plot()

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self._fill(len(self._experiment.measured) - 1)

    @property
    def _entries(self) -> list[MeasuredRecipe]:
        return self._experiment.measured

    def _fill(self, at: int) -> None:
        """Rebuild the rows, pinned ones first, else newest first; the cursor goes to the measurement with index `at`."""
        entries = self._entries
        self._order = sorted(range(len(entries)), key=lambda index: (not entries[index].pinned, -index))
        table = self.query_one(DataTable)
        table.clear(columns=True)
        for name in ("", "bytes", "drift", "SQNR", "KL nats", "same top", "perplexity", "time", "rules"):
            table.add_column(name)
        for index in self._order:
            table.add_row(*self._cells(index))
        table.move_cursor(row=self._order.index(at))
        self._plot(at)

    def _cells(self, index: int) -> list[Text]:
        entry = self._entries[index]
        mark = _mark(index) + ("*" if entry.pinned else " ") + ("c" if index == self._chosen else "")
        now = entry.recipe == self._experiment.recipe and entry.settings == str(self._experiment.settings)
        return [
            Text(mark, style="bold" if entry.pinned else ""),
            Text(short_bytes(entry.planned_bytes), justify="right"),
            Text(self._meaning(entry).word),
            Text("not finite" if entry.nonfinite else decibels(entry.sqnr_db), justify="right"),
            Text(_number(entry.kl_mean, ".3e"), justify="right"),
            Text("" if entry.top1_agreement is None else f"{100 * entry.top1_agreement:.2f} %", justify="right"),
            Text(_number(entry.perplexity, ".4f"), justify="right"),
            Text("" if entry.seconds is None else seconds_text(entry.seconds), justify="right"),
            Text(("now: " if now else "") + truncate(_rules(entry), 200), style="bold" if now else ""),
        ]

    def _meaning(self, entry: MeasuredRecipe) -> Meaning:
        """What a measurement means; the floor is known of the inputs in use alone."""
        return meaning(entry, self._experiment.floor if entry.inputs == self._experiment.inputs else None)

    @property
    def _at(self) -> int:
        """Index of the measurement under the cursor."""
        return self._order[self.query_one(DataTable).cursor_row]

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if self._order and event.cursor_row < len(self._order):
            entry = self._entries[self._order[event.cursor_row]]
            words = Text(_rules(entry), style="bold")
            words.append(f"\n{printable(entry.inputs, 100)}", style="not bold dim")
            if entry.settings != "defaults":
                words.append(f"; {printable(entry.settings, 100)}", style="not bold dim")
            if lost := loss_mark(entry.overflowed, entry.vanished):
                words.append(f"  {lost}")
            self.query_one("#rules", Static).update(words)

    def on_data_table_row_selected(self) -> None:
        self.action_go_back()

    def _plot(self, at: int) -> None:
        plot = self.query_one(Plot)
        plt = plot.plt
        plt.clear_data()
        distribution = any(entry.kl_mean is not None for entry in self._entries)
        for index, entry in enumerate(self._entries):
            drift = entry.kl_mean if distribution else -entry.sqnr_db
            if drift is None or not math.isfinite(drift) or (distribution and drift <= 0):
                continue
            # The logarithm is plotted: plotext's own scale fails where all values are one.
            height = math.log10(drift) if distribution else -drift
            plt.scatter([entry.planned_bytes / 2**20], [height], marker=_mark(index))
        plt.xlabel("planned MiB")
        plt.ylabel("log10 KL nats" if distribution else "SQNR dB")
        plot.refresh()

    def action_move(self, step: int) -> None:
        table = self.query_one(DataTable)
        table.move_cursor(row=max(0, min(table.cursor_row + step, len(self._order) - 1)))

    def action_go_back(self) -> None:
        self.dismiss(self._entries[self._at])

    def action_pin(self) -> None:
        at = self._at
        toggle_pin(self._entries, at)
        self._fill(at)

    def action_compare(self) -> None:
        at = self._at
        if self._chosen is None or self._chosen == at:
            self._chosen = None if self._chosen == at else at
            self._fill(at)
            return
        first, self._chosen = self._chosen, None
        self._fill(at)
        self.app.push_screen(_side_by_side(self._entries[first], self._entries[at], _mark(first), _mark(at)))


def _side_by_side(first: MeasuredRecipe, second: MeasuredRecipe, one: str, other: str) -> Overlay:
    """Two measurements, figure by figure, and the rules that only one of them has."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    table.add_row("", Text(one, style="bold"), Text(other, style="bold"))

    def row(name: str, left: str, right: str) -> None:
        table.add_row(name, left, Text(right, style="" if left == right else "bold"))

    row("planned", short_bytes(first.planned_bytes), short_bytes(second.planned_bytes))
    row("SQNR", decibels(first.sqnr_db), decibels(second.sqnr_db))
    row("max |Δ|", f"{first.max_abs:.4e}", f"{second.max_abs:.4e}")
    if first.nonfinite or second.nonfinite:
        row("non-finite", f"{first.nonfinite:,}", f"{second.nonfinite:,}")
    lost = [loss_mark(entry.overflowed, entry.vanished) or "none" for entry in (first, second)]
    if any(entry.overflowed or entry.vanished for entry in (first, second)):
        row("values lost", *lost)
    if first.kl_mean is not None and second.kl_mean is not None:
        row("KL mean", _with_error(first), _with_error(second))
    if first.top1_agreement is not None and second.top1_agreement is not None:
        row("same top", f"{100 * first.top1_agreement:.2f} %", f"{100 * second.top1_agreement:.2f} %")
    if first.perplexity is not None and second.perplexity is not None:
        row("perplexity", f"{first.perplexity:.4f}", f"{second.perplexity:.4f}")
    if first.seconds is not None and second.seconds is not None:
        row("time", seconds_text(first.seconds), seconds_text(second.seconds))
    row("inputs", printable(first.inputs, 200), printable(second.inputs, 200))
    row("settings", printable(first.settings, 200), printable(second.settings, 200))
    both = [rule for rule in first.rules if rule in second.rules]
    for title, entry in (("only in " + one, first), ("only in " + other, second)):
        for rule in entry.rules:
            if rule not in both:
                shown = printable(rule, 300)
                table.add_row(title, *((shown, "") if entry is first else ("", shown)))
    for rule in both:
        table.add_row("in both", printable(rule, 300), "")
    return Overlay("Two recipes side by side", table)


def _with_error(entry: MeasuredRecipe) -> str:
    error = f" ± {entry.kl_mean_se:.0e}" if entry.kl_mean_se is not None else ""
    return f"{_number(entry.kl_mean, '.3e')}{error} nats"


def _mark(index: int) -> str:
    return _MARKS[index] if index < len(_MARKS) else _OTHER_MARK


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _rules(entry: MeasuredRecipe) -> str:
    return printable(", ".join(entry.rules), 400) or "as stored"
