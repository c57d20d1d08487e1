"""The window with all measured recipes: a table, and a plot of drift against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import DataTable, Static

from dtype_engine.core.dtypes import BY_NAME
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.units import seconds_text
from dtype_engine.reports.text_drift import versus
from dtype_engine.results.figures import About, Figure, figures_in, not_always_measured
from dtype_engine.results.meaning import Meaning, meaning
from dtype_tui.rendering.canvas import Series, axes_around, linear_axes, plot
from dtype_tui.rendering.cells import short_bytes, truncate
from dtype_tui.rendering.loss_text import loss_mark
from dtype_tui.rendering.palette import ramp
from dtype_tui.screens.comparison import comparison_screen, side_of
from dtype_tui.screens.modal import ModalScreen
from dtype_tui.state.controller import Controller
from dtype_tui.state.measurement_log import MeasuredRecipe, mark, metric_names, toggle_pin, without_figures

_RULES = "rules"
_RULES_WIDTH = 22
"""Minimum width in cells of the column of rules. Other columns are left out to make room for it."""
_OMITTED: tuple[About, ...] = ("predictions", "values", "distribution")
"""The groups of figures that a narrow window omits, in this order."""
_PADDING = 2


class MeasurementsScreen(ModalScreen[MeasuredRecipe]):
    """Lists the measured recipes. The window's result is the recipe to go back to."""

    DEFAULT_CSS = """
    MeasurementsScreen { align: center middle; }
    MeasurementsScreen > Vertical { width: 96%; max-width: 116; height: 94%; border: round $accent; padding: 0 1;
        background: $surface; }
    MeasurementsScreen DataTable { height: 1fr; min-height: 5; scrollbar-size-vertical: 1; overflow-x: hidden; }
    MeasurementsScreen #rules { height: auto; max-height: 4; }
    MeasurementsScreen #plot { height: 1fr; min-height: 8; max-height: 16; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "go_back", "Go back to the recipe"),
        Binding("p", "pin", "Pin the recipe: pinned recipes come first"),
        Binding("c", "compare", "Compare two recipes: press the key on each"),
        Binding("P", "compare_all", "Make the recipe the baseline for the tree and the panes, or remove the baseline"),
        Binding("m", "measure", "Measure all recipes on the current inputs with the current settings"),
        Binding("y", "axis", "Plot the drift, or one of your own metrics"),
        Binding("j", "move(1)", "Down", show=False),
        Binding("k", "move(-1)", "Up", show=False),
        Binding("escape,q,H", "leave", "Close"),
    ]

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self._controller = controller
        self._experiment = controller.experiment
        self._seen: tuple[MeasuredRecipe, ...] = ()
        self._chosen: int | None = None
        self._order: list[int] = []
        self._filled_for = 0

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = f"Measured recipes {versus(self._experiment.model.reference)}"
            box.border_subtitle = "Enter goes back  p pins  c compares  P all  m measures  Esc closes"
            yield DataTable(cursor_type="row", zebra_stripes=False, cursor_foreground_priority="renderable")
            yield Static(id="rules", markup=False)
            yield Static(id="plot", markup=False)

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self._fill(len(self._experiment.measured) - 1)

    def show_figures(self) -> None:
        """Add recipes that were measured since the last call. The cursor stays on its recipe."""
        if self._seen != self._entries:
            at = self._entries[self._at].key if self._at < len(self._entries) else None
            keys = [entry.key for entry in self._entries]
            self._fill(keys.index(at) if at in keys else len(keys) - 1)

    @property
    def _entries(self) -> tuple[MeasuredRecipe, ...]:
        return self._experiment.measured

    @property
    def _figures(self) -> list[Figure]:
        """The figures that have a column. Those that not all measurements have are among them if one of these has them."""
        further = not_always_measured(entry.output for entry in self._entries)
        return [row for row in figures_in("history") if row.is_always_measured or row in further]

    def _fill(self, at: int) -> None:
        """Fill the table again: pinned measurements first, then the newest first. at: the cursor's new index in the history."""
        entries = self._entries
        self._seen = entries
        self._order = sorted(range(len(entries)), key=lambda index: (not entries[index].pinned, -index))
        rows = [self._cells(index) for index in self._order]
        self._filled_for = self._width
        table = self.query_one(DataTable)
        table.clear(columns=True)
        shown = fitting(rows, self._filled_for)
        for name, width in shown.items():
            table.add_column(Text(name), width=width)
        for row in rows:
            row[_RULES].truncate(shown[_RULES], overflow="ellipsis")
            table.add_row(*(row[name] for name in shown))
        table.move_cursor(row=self._order.index(at))
        self.call_after_refresh(self._plot)

    @property
    def _width(self) -> int:
        """The total width of the columns in cells. It is estimated until the layout is known, because keys may be pressed first."""
        table = self.query_one(DataTable)
        return (table.size.width or min(116, self.app.size.width * 96 // 100) - 4) - 1  # a scrollbar may come

    def _cells(self, index: int) -> dict[str, Text]:
        entry = self._entries[index]
        marks = mark(index) + ("*" if entry.pinned else " ") + ("c" if index == self._chosen else "")
        marks += "P" if self._experiment.is_baseline(entry) else ""
        now = entry.recipe == self._experiment.recipe and entry.settings == self._experiment.settings
        return {
            "": Text(marks, style="bold" if entry.pinned else ""),
            "bytes": Text(short_bytes(entry.planned_bytes), justify="right"),
            "drift": Text(self._meaning(entry).word, style=ramp(self._meaning(entry).word)),
            **{
                row.label_in("history"): Text(row.text_in("history", entry.output, entry.extent) or "", justify="right")
                for row in self._figures
            },
            **{printable(name, 24): _metric_cell(entry, name) for name in metric_names(self._entries)},
            "time": Text(_time_or_extent(entry), justify="right", style="dim" if entry.in_part else ""),
            _RULES: Text(("now: " if now else "") + truncate(_rules(entry), 200), style="bold" if now else ""),
        }

    def _meaning(self, entry: MeasuredRecipe) -> Meaning:
        """Return a rating of a measurement's drift. It considers the noise floor if the inputs are the current ones."""
        return meaning(entry.output, self._experiment.floor if entry.inputs == self._experiment.model.inputs else None)

    @property
    def _at(self) -> int:
        return self._order[self.query_one(DataTable).cursor_row]

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if self._order and event.cursor_row < len(self._order):
            entry = self._entries[self._order[event.cursor_row]]
            words = Text(_rules(entry), style="bold")
            words.append(f"\n{printable(entry.inputs, 100)}", style="not bold dim")
            if entry.in_part:
                words.append(f"; over {_time_or_extent(entry)} sequences", style="not bold dim")
            if entry.settings != RunSettings():
                words.append(f"; {printable(str(entry.settings), 100)}", style="not bold dim")
            if self._experiment.model.reference not in BY_NAME:
                words.append(f"; reference: {printable(self._experiment.model.reference, 100)}", style="not bold dim")
            if lost := loss_mark(entry.overflowed or 0, entry.vanished or 0):
                words.append(f"  {lost}")
            self.query_one("#rules", Static).update(words)

    def on_data_table_row_selected(self) -> None:
        self.action_go_back()

    def on_resize(self) -> None:
        self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        if self._filled_for != self._width:
            self._fill(self._at)
        else:
            self._plot()

    def _plot(self) -> None:
        """Plot the drift of the measured recipes, or one of the user's own metrics, against their bytes."""
        widget = self.query_one("#plot", Static)
        axis = self._experiment.axis
        distribution = any(entry.output.kl_mean is not None for entry in self._entries)
        series = []
        for index, entry in enumerate(self._entries):
            drift = entry.height(axis, distribution)
            if drift is not None:
                series.append(Series(((entry.planned_bytes / 2**20, drift),), mark(index), "bold"))
        points = [point for each in series for point in each.points]
        axes = linear_axes(points) if axis else axes_around(points)
        drawn = plot(series, axes, max(20, widget.size.width), max(4, widget.size.height - 1))
        unit = printable(axis, 40) or ("KL, nats" if distribution else "relative squared error")
        more = "; y plots another figure" if metric_names(self._entries) else ""
        drawn.append(f"\n across: planned MiB, up: {unit}{more}", style="dim")
        widget.update(drawn)

    def action_axis(self) -> None:
        axes = ("", *metric_names(self._entries))
        if len(axes) == 1:
            self.notify("there are no metrics of your own: --metric file.py:function measures one")
        at = axes.index(self._experiment.axis) if self._experiment.axis in axes else 0
        self._experiment.axis = axes[(at + 1) % len(axes)]
        self._plot()

    def action_move(self, step: int) -> None:
        table = self.query_one(DataTable)
        table.move_cursor(row=max(0, min(table.cursor_row + step, len(self._order) - 1)))

    def action_go_back(self) -> None:
        self.dismiss(self._entries[self._at])

    def action_measure(self) -> None:
        recipes = without_figures(self._entries, self._experiment.settings, self._experiment.model.inputs)
        if not recipes:
            self.notify("all are already measured on these inputs with these settings", severity="information")
        self._controller.measure_recipes(recipes)

    def action_pin(self) -> None:
        at = self._at
        self._experiment.measured = toggle_pin(self._entries, at)
        self._fill(at)

    def action_compare(self) -> None:
        at = self._at
        if self._chosen is None or self._chosen == at:
            self._chosen = None if self._chosen == at else at
            self._fill(at)
            return
        first, self._chosen = self._chosen, None
        self._fill(at)
        sides = (side_of(self._experiment, self._entries[index], mark(index)) for index in (first, at))
        self.app.push_screen(comparison_screen(self._experiment, *sides))

    def action_compare_all(self) -> None:
        at = self._at
        self._experiment.compare_with(self._entries[at])
        self._fill(at)


def fitting(rows: Sequence[Mapping[str, Text]], width: int) -> dict[str, int]:
    """Return the widths of the columns that fit into `width` cells, by name. rows: the cells of the table, by column name.

    The column of rules gets all remaining cells. If these are too few, other columns are left out: first empty columns, then
    figures in the order of `_OMITTED`, then the bytes, then figures that a setting asks for, and last the user's metrics.
    """
    widths = {name: max(len(name), *(row[name].cell_len for row in rows)) for name in rows[0]}
    wanted = min(widths.pop(_RULES), _RULES_WIDTH) + _PADDING
    by_use = [row for about in _OMITTED for row in reversed(figures_in("history", about))]
    usual, asked = ([row.label_in("history") for row in by_use if bool(row.setting) is on] for on in (False, True))
    figures = [name for name in (*usual, "bytes", *asked) if name in widths]
    optional = (*figures, *(name for name in widths if name not in {"", "drift", "time", *figures}))
    for name in sorted(optional, key=lambda name: any(row[name] for row in rows)):
        if sum(widths.values()) + _PADDING * len(widths) + wanted <= width:
            break
        del widths[name]
    return widths | {_RULES: max(1, width - sum(widths.values()) - _PADDING * (len(widths) + 1))}


def _time_or_extent(entry: MeasuredRecipe) -> str:
    """Return the time of the candidate's passes. If not all sequences were run, return how many instead, such as `2 of 6`."""
    if entry.in_part:
        return f"{entry.extent.done:,} of {entry.extent.total:,}"
    return "" if entry.seconds is None else seconds_text(entry.seconds)


def _metric_cell(entry: MeasuredRecipe, name: str) -> Text:
    change = entry.metric(name)
    return Text("" if change is None else f"{change.candidate:.4g}", justify="right")


def _rules(entry: MeasuredRecipe) -> str:
    return printable(str(entry.recipe), 400)
