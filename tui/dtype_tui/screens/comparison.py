"""The window that compares two recipes: their metrics, rules, tensors and modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, human_bytes, plural, seconds_text, signed
from dtype_engine.recipe import Plan, Recipe, make_plan, tensor_bytes
from dtype_engine.reports.text_groups import labelled_groups
from dtype_engine.results.drift import ModuleDrift, sqnr_gain
from dtype_engine.results.figures import About, cells
from dtype_engine.results.meaning import meaning
from dtype_tui.rendering.cells import short_bytes
from dtype_tui.rendering.loss_text import loss_mark
from dtype_tui.rendering.palette import ramp
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.overlay import Overlay
from dtype_tui.state.experiment import Experiment
from dtype_tui.state.measurement_log import MeasuredRecipe, metric_names

MOST_ROWS = 300


@dataclass(frozen=True, slots=True)
class Side:
    """One recipe of a comparison, and what is known about it."""

    title: str
    """The short name of the recipe for headings."""
    recipe: Recipe
    entry: MeasuredRecipe | None
    modules: Mapping[str, ModuleDrift] | None
    """The drift of each module by name, or None if the app no longer keeps it."""


def side_of(experiment: Experiment, entry: MeasuredRecipe, title: str) -> Side:
    """Return a measured recipe as one side of a comparison. title: the recipe's short name for headings."""
    return Side(title, entry.recipe, entry, experiment.module_log.of(entry))


def side_of_recipe(experiment: Experiment, recipe: Recipe, title: str) -> Side:
    """Return a recipe as one side of a comparison, with its measurement on the current inputs and settings, if any."""
    now = experiment.settings, experiment.model.inputs
    for entry in experiment.measured:
        if entry.recipe == recipe and (entry.settings, entry.inputs) == now:
            return side_of(experiment, entry, title)
    return Side(title, recipe, None, None)


def comparison_screen(experiment: Experiment, one: Side, other: Side) -> Overlay:
    """Return a window that compares the metrics, rules, groups of positions, tensors and modules of two recipes. Differences are
    bold.
    """
    plans = make_plan(experiment.tree, one.recipe), make_plan(experiment.tree, other.recipe)
    tensors = _tensors(experiment, plans, one.title, other.title)
    rules = Group(_heading("rules"), _rules(one, other))
    page = Group(_figures(one, other, plans), rules, *_groups(one, other), tensors, _modules(one, other))
    return Overlay("Two recipes side by side", page)


def _heading(words: str) -> Text:
    return Text(f"\n{words}", style="bold")


def _columns(*titles: str) -> Table:
    table = PlainTable.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    for _ in titles[1:]:
        table.add_column(no_wrap=True, justify="right")
    table.add_row(*(Text(title, style="dim") for title in titles))
    return table


def _figures(one: Side, other: Side, plans: tuple[Plan, Plan]) -> Table:
    table = PlainTable.labelled(columns=2)
    table.add_row("", Text(one.title, style="bold"), Text(other.title, style="bold"))

    def row(name: str, left: str, right: str) -> None:
        table.add_row(name, left, Text(right, style="" if left == right else "bold"))

    row("planned", *(short_bytes(plan.planned_bytes) for plan in plans))
    first, second = one.entry, other.entry
    if first is None or second is None:
        row("drift", *("measured" if entry is not None else "not measured" for entry in (first, second)))
        return table

    def both(name: str, shown: Callable[[MeasuredRecipe], str | None]) -> None:
        left, right = shown(first), shown(second)
        if left is not None and right is not None:
            row(name, left, right)

    words = (meaning(entry.output).word for entry in (first, second))
    table.add_row("meaning", *(Text(word, style=ramp(word)) for word in words))

    def figures(*about: About) -> None:
        left, right = (
            {cell.label: cell.text for cell in cells("comparison", entry.output, entry.extent, *about)}
            for entry in (first, second)
        )
        for label in left:
            if label in right:
                row(label, left[label], right[label])

    figures("values")
    if not (first.output.is_finite and second.output.is_finite):
        both("non-finite", lambda entry: entry.output.nonfinite_text)
    if any(entry.overflowed is None or entry.overflowed or entry.vanished for entry in (first, second)):
        both("values lost", _values_lost)
    figures("distribution", "predictions")
    for name in metric_names((first, second)):
        both(printable(name, 40), lambda entry, name=name: (found := entry.metric(name)) and found.short)  # type: ignore[misc]
    both("time", lambda entry: None if entry.seconds is None else seconds_text(entry.seconds))
    both("inputs", lambda entry: printable(entry.inputs, 200))
    both("settings", lambda entry: printable(str(entry.settings), 200))
    return table


def _values_lost(entry: MeasuredRecipe) -> str:
    if entry.overflowed is None or entry.vanished is None:
        return "not counted"
    return loss_mark(entry.overflowed, entry.vanished) or "none"


def _rules(one: Side, other: Side) -> Table:
    table = _columns("", "")
    both = [rule for rule in one.recipe.rules if rule in other.recipe.rules]
    for side in (one, other):
        for rule in side.recipe.rules:
            if rule not in both:
                table.add_row(Text(printable(str(rule), 300), style="bold"), f"only in {side.title}")
    for rule in both:
        table.add_row(printable(str(rule), 300), "in both")
    if not one.recipe.rules and not other.recipe.rules:
        table.add_row("none: as stored", "")
    return table


def _groups(one: Side, other: Side) -> list[RenderableType]:
    """Return a heading and a table of the groups of positions that both recipes were measured on, or [] if there are none."""
    left, right = ({} if side.entry is None else labelled_groups(side.entry.output) for side in (one, other))
    if not any(label in right for label in left):
        return []
    table = _columns("", f"KL in {one.title}", f"in {other.title}", f"same top-1 in {one.title}", f"in {other.title}")
    for label, group in left.items():
        if (against := right.get(label)) is not None:
            kls = (f"{each.kl_mean:.2e}" for each in (group, against))
            table.add_row(label, *kls, *(f"{100 * each.top1_agreement:.2f} %" for each in (group, against)))
    return [_heading("groups of positions"), table]


def _tensors(experiment: Experiment, plans: tuple[Plan, Plan], left: str, right: str) -> RenderableType:
    """Return a table of the tensors that have different dtypes under the plans of two recipes. left, right: their short names."""
    first, second = plans
    differ = [tensor for tensor in experiment.tree.order if first.dtypes[tensor.name] != second.dtypes[tensor.name]]
    caches = [name for name in experiment.tree.caches if first.caches.get(name) != second.caches.get(name)]
    if not differ and not caches:
        return _heading("tensors: all have the same dtype in both")
    table = _columns("", left, right, f"bytes in {left}", f"in {right}")
    for tensor in differ[:MOST_ROWS]:
        names = [plan.dtypes[tensor.name] for plan in plans]
        sizes = [human_bytes(tensor_bytes(tensor, name)) for name in names]
        table.add_row(printable(tensor.name, 300), *map(dtypes.short_name, names), *sizes)
    for name in caches[: max(0, MOST_ROWS - len(differ))]:
        forms = (dtypes.short_name(plan.caches.get(name, dtypes.STORED)) for plan in plans)
        table.add_row(printable(name, 300), *forms, "", "")
    if len(differ) + len(caches) > MOST_ROWS:
        table.add_row(f"and {len(differ) + len(caches) - MOST_ROWS:,} more", "", "", "", "")
    return Group(_heading(f"{plural(len(differ) + len(caches), 'tensor')} of another dtype"), table)


def _modules(one: Side, other: Side) -> RenderableType:
    """Return a table of the modules whose drift differs between two recipes, largest difference first."""
    if one.modules is None or other.modules is None:
        return _heading("modules: not kept for both; going back to a recipe measures it again")
    rows = []
    for name, drift in one.modules.items():
        against = other.modules.get(name)
        if against is not None and against.sqnr_db != drift.sqnr_db:
            gain = sqnr_gain(drift, against)
            rows.append((-abs(gain) if gain is not None else float("-inf"), name, drift.sqnr_db, against.sqnr_db, gain))
    if not rows:
        return _heading("modules: all drift alike")
    table = _columns("", one.title, other.title, "difference")
    for _, name, left, right, gain in sorted(rows, key=lambda row: row[0])[:MOST_ROWS]:
        difference = "" if gain is None else f"{signed(gain, 2)} dB"
        table.add_row(printable(name, 300), decibels(left), decibels(right), difference)
    if len(rows) > MOST_ROWS:
        table.add_row(f"and {len(rows) - MOST_ROWS:,} more", "", "", "")
    return Group(_heading("SQNR of modules"), table)
