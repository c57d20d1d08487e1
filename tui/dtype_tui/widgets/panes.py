"""The three side panes: Drift, Memory, Recipe. Each draws the experiment as it is; none keeps anything of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static

from dtype_engine.core import dtypes
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, human_bytes, percent
from dtype_engine.recipe import Rule
from dtype_engine.reports.text_drift import first_sentence, floor_text, value_sentence
from dtype_engine.reports.text_losses import HELP as HELP_LOSSES
from dtype_engine.results.thresholds import verdicts
from dtype_tui.rendering.cells import colour, fit, short_bytes
from dtype_tui.rendering.loss_text import loss_rows

if TYPE_CHECKING:
    from dtype_engine.results.attribution import NonFiniteDiagnosis
    from dtype_engine.results.drift import DriftReport, ModuleDrift
    from dtype_tui.state.experiment import Experiment


class Pane(VerticalScroll, can_focus=False):
    """A titled box around one text. `HELP` says in the help screen what its words mean."""

    HELP = ""

    DEFAULT_CSS = """
    Pane { border: round $surface-lighten-2; border-title-color: $accent; padding: 0 1; height: auto; scrollbar-size-vertical: 1; }
    Pane > Static { height: auto; }
    """

    def __init__(self, experiment: Experiment, title: str, id: str) -> None:
        super().__init__(id=id)
        self.experiment = experiment
        self.border_title = title
        self._shown: list[list[Segment]] = []
        self._asked = ("", "")

    def compose(self) -> ComposeResult:
        yield Static(id=f"{self.id}-text", markup=False)

    def show(self, activity: str = "", node: str = "") -> None:
        """Draw anew, where that looks otherwise. `activity`: what the engine does, in a few words; `node`: the node under the
        cursor.
        """
        self._asked = (activity, node)
        if not self.is_mounted or not self.display:
            return
        drawn = self.draw(activity, node)
        console = self.app.console
        lines = console.render_lines(drawn, console.options.update(width=self.columns, height=None))
        if lines != self._shown:
            self._shown = lines
            self.query_one(Static).update(drawn)

    def on_resize(self) -> None:
        self.show(*self._asked)

    def draw(self, activity: str, node: str) -> Text | Table:
        raise AssertionError("each pane draws itself")

    @property
    def columns(self) -> int:
        """Cells of text that fit in a line."""
        return max(20, self.size.width)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


class DriftPane(Pane):
    """How far the output is from the float32 reference, for the recipe in force and no other."""

    HELP = (
        "mean |Δ|, max |Δ|, relative L2, SQNR and cosine compare the main output with the float32 reference. "
        "KL is nats per position, ± its standard error. Same top: share of positions whose likeliest token is the same. "
        "Floor: the drift of the reference against itself, under another attention implementation and as one of a batch of "
        "two; a drift no larger is noise. Causes (d): each module with weights is run as cast by itself, all else as the "
        "reference; its share is the drift of the output then over that of the whole recipe. Shares need not add up to "
        "100 %: errors interact, and the rounding of sums and activations between modules belongs to none. "
        + HELP_LOSSES
    )

    def draw(self, activity: str, node: str) -> Text | Table:
        experiment = self.experiment
        if experiment.failure:
            return self._with_losses(Text(experiment.failure, style="bold"))
        if experiment.no_forward:
            return self._with_losses(Text(f"No drift: {experiment.no_forward}"))
        if experiment.report is None:
            if not experiment.live:
                return self._with_losses(Text("Drift appears when the model is loaded and has run.", style="dim"))
            words = activity or "Not measured: press m."
            text = Text(words, style="dim")
            if guess := experiment.predicted():
                text.append(f"\npredicted {guess}", style="not dim bold")
            worst = experiment.worst_modules(5)
            if worst:
                text.append("\nso far, worst modules\n")
                _append_modules(text, worst, self.columns)
            return self._with_losses(text)
        return self._report(experiment.report)

    def _with_losses(self, text: Text) -> Text:
        """What the casts lose is known before a drift is, and where there will be none."""
        for label, words in reversed(self._loss_rows()):
            text = Text.assemble((f"{label} " if label else "", "bold"), words, "\n", text)
        return text

    def _loss_rows(self) -> list[tuple[str, str]]:
        experiment = self.experiment
        return loss_rows(experiment.lost, experiment.lost_reason, experiment.loss_remedy, experiment.loss_remedy_next)

    def _report(self, report: DriftReport) -> Table:
        output = report.output
        grid = _grid()
        floor = self.experiment.floor
        if floor is not None and floor.hides(output):
            grid.add_row("noise", Text("no more than its floor", style="bold"))
        for verdict in verdicts(self.experiment.thresholds, output):
            grid.add_row("pass" if verdict.passed else Text("FAIL", style="bold red"), verdict.short)
        if self.experiment.nonfinite is not None:
            _add_nonfinite(grid, self.experiment.nonfinite)
        grid.add_row("SQNR", Text(decibels(output.sqnr_db), style="bold"))
        for label, words in self._loss_rows():
            grid.add_row(label, Text(words, style="bold"))
        grid.add_row("mean |Δ|", f"{output.mean_abs:.4e}")
        grid.add_row("max |Δ|", f"{output.max_abs:.4e}")
        grid.add_row("rel. L2", f"{output.rel_l2:.2e}  cosine {output.cosine:.6f}")
        if output.nonfinite:
            grid.add_row("non-finite", Text(f"{output.nonfinite:,} of {output.elements:,}", style="bold red"))
        if output.kl_mean is not None and not math.isnan(output.kl_mean):
            error = f" ± {output.kl_mean_se:.0e}" if output.kl_mean_se is not None else ""
            grid.add_row("KL mean", Text(f"{output.kl_mean:.3e}{error} nats", style="bold"))
            tail = [f"p99 {output.kl_p99:.1e}"] if output.kl_p99 is not None else []
            tail += [f"max {output.kl_max:.1e}"] if output.kl_max is not None else []
            grid.add_row("KL tail", "  ".join(tail))
        if floor is not None and floor.ways:
            grid.add_row("floor", floor_text(floor))
        if guess := self.experiment.predicted():
            grid.add_row("predicted", f"{guess}, sum of singles")
        if output.top1_agreement is not None:
            error = f" ± {100 * output.top1_agreement_se:.2f}" if output.top1_agreement_se is not None else ""
            grid.add_row("same top", f"{100 * output.top1_agreement:.2f}{error} %")
        if output.perplexity_reference is not None and output.perplexity_candidate is not None:
            grid.add_row("perplexity", f"{output.perplexity_reference:.4f} → {output.perplexity_candidate:.4f}")
        if report.settings != str(RunSettings()):
            grid.add_row("settings", report.settings)
        grid.add_row("of", printable(f"{report.output_name}, {report.inputs}", 200))
        if report.seconds.reference is not None and report.seconds.candidate is not None:
            partly = "the changed part: " if report.seconds.reused else ""
            words = f"{partly}{report.seconds.candidate:.2f} s (reference {report.seconds.reference:.2f} s)"
            grid.add_row("time", words)
        worst = self.experiment.worst_modules(3)
        if worst:
            text = Text()
            _append_modules(text, worst, self.columns - 11)
            grid.add_row("worst (w)", text)
        return grid


def _add_nonfinite(grid: Table, found: NonFiniteDiagnosis) -> None:
    """Where values stop being finite, and the rule that one key applies."""
    grid.add_row("not finite", Text(first_sentence(found), style="bold"))
    if values := value_sentence(found):
        grid.add_row("because", values)
    if found.remedy is not None:
        rule = Rule.parse(found.remedy)
        words = f"{printable(rule.pattern, 200)} → {dtypes.badge(rule.dtype)}"
        grid.add_row("a applies", Text(words, style="bold"))
    else:
        grid.add_row("no remedy", printable(found.reason, 300))


def _append_modules(text: Text, readings: list[ModuleDrift], width: int) -> None:
    for index, reading in enumerate(readings):
        number = "not finite" if reading.nonfinite else decibels(reading.sqnr_db)
        name = printable(reading.name, 300)
        room = max(8, width - 11)
        name = name if len(name) <= room else "…" + name[-(room - 1) :]
        text.append(("\n" if index else "") + f"{number:>10} ", style="bold" if reading.nonfinite else "")
        text.append(name, style="dim")


class MemoryPane(Pane):
    """Bytes: of the checkpoint, of the plan, of the live tensors, of the process."""

    HELP = (
        "stored: the checkpoint's tensors. planned: the same under the recipe, scales included, tied weights once; "
        "percentages are shares of these bytes. "
        "resident: all tensors of the live model now. process: resident set; anonymous is memory of its own, mapped are "
        "pages of the checkpoint's files, which the system can take back. peak: of the process since the last "
        "measurement began."
    )

    def draw(self, activity: str, node: str) -> Text | Table:
        experiment = self.experiment
        plan, reading = experiment.plan, experiment.memory
        if experiment.partial:
            return Text("Bytes appear when all headers are read.", style="dim")
        grid = _grid()
        change = ""
        if plan.stored_bytes and plan.planned_bytes != plan.stored_bytes:
            change = f"  {100 * (plan.planned_bytes / plan.stored_bytes - 1):+.1f} %"
        grid.add_row("stored", human_bytes(plan.stored_bytes))
        grid.add_row("planned", Text.assemble((human_bytes(plan.planned_bytes), "bold"), change))
        grid.add_row("", self._mix())
        if reading is None:
            return grid
        if reading.resident_bytes is not None:
            devices = ", ".join(f"{name} {human_bytes(size)}" for name, size in reading.resident_by_device if size)
            grid.add_row("resident", devices or human_bytes(reading.resident_bytes))
        if reading.rss_bytes is not None:
            peak = f", peak {short_bytes(reading.peak_rss_bytes)}" if reading.peak_rss_bytes is not None else ""
            grid.add_row("process", f"{short_bytes(reading.rss_bytes)}{peak}")
            if reading.anonymous_bytes is not None:
                grid.add_row("anonymous", human_bytes(reading.anonymous_bytes))
            if reading.mapped_bytes is not None:
                grid.add_row("mapped", f"{human_bytes(reading.mapped_bytes)} of the checkpoint")
        if reading.device_allocated_bytes is not None:
            grid.add_row(
                "device",
                f"allocated {human_bytes(reading.device_allocated_bytes)}, reserved "
                f"{human_bytes(reading.device_reserved_bytes or 0)}, peak {human_bytes(reading.device_peak_bytes or 0)}",
            )
        return grid

    def _mix(self) -> Text:
        """The planned bytes as a bar, one letter-marked stretch a dtype, against the stored bytes' full length."""
        shares = self.experiment.totals[""].mix()
        plan = self.experiment.plan
        width = max(10, self.columns - 12)
        whole = max(plan.stored_bytes, plan.planned_bytes)
        text = Text()
        drawn = 0
        for index, (dtype, share) in enumerate(shares):
            cells = round(width * share * plan.planned_bytes / whole) if whole else 0
            cells = max(cells, 1 if share else 0)
            text.append("█▓▒░"[min(index, 3)] * cells, style=colour(dtype))
            drawn += cells
        text.append("·" * max(0, width - drawn), style="dim")
        used = width  # the legend starts on a line of its own, and none of its entries is broken
        for index, (dtype, share) in enumerate(shares):
            entry = f" {dtypes.badge(dtype)} {percent(share)} %"
            fits = used + 3 + len(entry) <= width
            text.append("  " if fits else "\n")
            text.append("█▓▒░"[min(index, 3)], style=colour(dtype))
            text.append(entry)
            used = (used + 2 if fits else 0) + 1 + len(entry)
        return text


class RecipePane(Pane):
    """The rules in order, and which of them decided the node under the cursor."""

    HELP = (
        "Rules in the order they were made, with the number of tensors each takes; the last that matches wins. "
        "Below: what decided the node under the cursor."
    )

    def draw(self, activity: str, node: str) -> Text | Table:
        experiment = self.experiment
        plan = experiment.plan
        text = Text()
        if not experiment.recipe.rules:
            text.append("No rules: every tensor is as stored.\n", style="dim")
            text.append("c casts by a pattern, 1 to 8 cast the node.", style="dim")
            return text
        for place, rule in enumerate(experiment.recipe.rules):
            taken = len(plan.selections[place])
            dtype = "stored" if rule.dtype == dtypes.STORED else dtypes.badge(rule.dtype)
            room = max(8, self.columns - len(dtype) - len(f"{taken:,}") - 8)
            text.append(f"{place + 1:>2} ", style="dim")
            text.append(fit(printable(rule.pattern, 500), room))
            text.append(" → ", style="dim")
            text.append(dtype, style=f"bold {colour(rule.dtype)}")
            if place in plan.too_slow:
                text.append("\n   ⚠ takes too long to match", style="bold")
            elif place in plan.unmatched:
                text.append("\n   ⚠ takes nothing in this model", style="bold")
            elif place in plan.waiting:
                text.append("\n   waits for the model's classes", style="dim")
            else:
                text.append(f"  {taken:,}", style="dim")
            text.append("\n")
        rows = experiment.explain(node)
        label = fit(printable(node.rpartition(".")[2] or "the model", 200), max(8, self.columns - 14))
        if not rows:
            text.append(f"{label}: as stored", style="dim")
            return text
        for place, _, won, taken in rows:
            verdict = "decides" if won == taken else "loses" if won == 0 else f"decides {won} of {taken}"
            text.append(f"{label}: ", style="dim")
            text.append(f"rule {place + 1} {verdict}\n", style="" if won else "dim")
        text.right_crop(1)
        return text


class SidePanes(Vertical):
    """The panes: one above the other where there is room, else one at a time below a line of tabs."""

    DEFAULT_CSS = """
    SidePanes { width: 1fr; min-width: 38; }
    SidePanes > #tabs { display: none; height: 1; }
    SidePanes > DriftPane { max-height: 50%; }
    SidePanes > MemoryPane { max-height: 34%; }
    SidePanes > RecipePane { height: 1fr; min-height: 4; }
    SidePanes.narrow { width: 100%; height: 11; min-width: 0; }
    SidePanes.narrow > #tabs { display: block; }
    SidePanes.narrow > Pane { display: none; height: 1fr; max-height: 100%; border: none; }
    SidePanes.narrow > Pane.active { display: block; }
    """

    BINDINGS = [Binding("tab", "next", "Next pane", show=False)]  # noqa: RUF012 - Textual's own idiom

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(id="side")
        self.panes: list[Pane] = [
            DriftPane(experiment, "Drift", "drift"),
            MemoryPane(experiment, "Memory", "memory"),
            RecipePane(experiment, "Recipe", "recipe"),
        ]
        self._active = 0

    def compose(self) -> ComposeResult:
        yield Static(id="tabs", markup=False)
        yield from self.panes

    def on_mount(self) -> None:
        self._mark()

    def set_narrow(self, narrow: bool) -> None:
        self.set_class(narrow, "narrow")

    def next_pane(self) -> None:
        """Bring the next pane to the front (seen only where they take turns)."""
        self._active = (self._active + 1) % len(self.panes)
        self._mark()

    def _mark(self) -> None:
        tabs = Text(" ")
        for place, pane in enumerate(self.panes):
            pane.set_class(place == self._active, "active")
            title = str(pane.border_title)
            tabs.append(
                f"[{title}]" if place == self._active else f" {title} ",
                style="bold" if place == self._active else "dim",
            )
            tabs.append(" ")
        tabs.append("  tab: next", style="dim")
        self.query_one("#tabs", Static).update(tabs)

    def show(self, activity: str, node: str) -> None:
        """Draw all panes anew."""
        for pane in self.panes:
            pane.show(activity, node)
