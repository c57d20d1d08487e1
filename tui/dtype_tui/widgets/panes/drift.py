"""The Drift pane: how far the model's output is from the float32 reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from dtype_engine.core import dtypes
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, percent_with_error, plural
from dtype_engine.recipe import Rule
from dtype_engine.reports.text_drift import (
    extent_text,
    first_sentence,
    floor_text,
    kl_text,
    modules_extent_text,
    sqnr_text,
    value_sentence,
)
from dtype_engine.reports.text_losses import HELP as HELP_LOSSES
from dtype_engine.results.meaning import HELP as HELP_MEANING
from dtype_engine.results.meaning import meaning
from dtype_engine.results.thresholds import verdicts
from dtype_tui.rendering.loss_text import loss_rows
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.rendering.worst_lines import worst_lines, worst_lines_or_longer
from dtype_tui.widgets.panes.base import Pane

if TYPE_CHECKING:
    from dtype_engine.results.attribution import NonFiniteDiagnosis
    from dtype_engine.results.drift import DriftReport, Extent, OutputDrift, PartialDrift

_LABEL_WIDTH = len("perplexity")
"""The width in cells of the longest label at the beginning of the pane's rows."""


class DriftPane(Pane):
    """Shows how far the model's output under the current recipe is from the float32 reference."""

    HELP = (
        "mean |Δ|, max |Δ|, relative L2, SQNR and cosine compare the main output with the float32 reference. "
        "KL is in nats per position, ± its standard error; while inputs remain, ± says how far the KL over all inputs may differ. "
        "Same top: share of positions at which the most likely token is the same. "
        "Modules are compared in about a sixth of the sequences; m compares them in all. "
        "Floor: the drift of the reference against itself, under another attention implementation and in a batch of "
        "two; a drift that is not larger is noise. "
        + HELP_MEANING
        + " Causes (d): the model runs with the casts of one module at a time, and everything else as in the reference; a module's "
        "share is the drift of that output relative to the drift of the whole recipe. Shares need not add up to "
        "100 %: errors interact, and the rounding of sums and activations between modules belongs to no module. "
        + HELP_LOSSES
    )

    def draw(self, activity: str, node: str) -> Text | Table:
        experiment, results = self.experiment, self.experiment.results
        if results.failure:
            return self._with_losses(Text(results.failure, style="bold"))
        if experiment.model.no_forward:
            return self._with_losses(
                Text(
                    f"No drift: {printable(experiment.model.no_forward.removeprefix(f'{experiment.model.title}: '), 500)}"
                )
            )
        if results.report is None:
            if not experiment.model.live:
                return self._with_losses(Text("Drift appears when the model is loaded and has run.", style="dim"))
            if results.partial_drift is not None:
                return self._partial(results.partial_drift, running=bool(activity))
            worst = results.worst_modules(5)
            words = activity or ("Stopped before the end: press m." if worst else "Not measured: press m.")
            text = Text(words, style="dim")
            if guess := experiment.predicted():
                text.append(f"\npredicted {guess}", style="not dim bold")
            if worst:
                lines = worst_lines(worst, self.columns, experiment.tree.modules)
                text.append("\nworst modules so far" + ("" if lines is not None else ", SQNR in dB"))
                if lines is None:
                    lines = worst_lines_or_longer(worst, self.columns, experiment.tree.modules)
                text.append_text(Text("\n").join([Text(), *lines]))
            return self._with_losses(text)
        return self._report(results.report)

    def _with_losses(self, text: Text) -> Text:
        """Return the text with rows before it about the weight values that casts make infinite or zero.

        These rows are known before the drift is, and even if the drift can't be measured.
        """
        for label, words in reversed(self._loss_rows()):
            text = Text.assemble((f"{label} " if label else "", "bold"), words, "\n", text)
        return text

    def _loss_rows(self) -> list[tuple[str, str]]:
        results = self.experiment.results
        losses = results.losses
        return loss_rows(losses.values, losses.reason, results.loss_remedy, results.loss_remedy_next)

    def _partial(self, partial: PartialDrift, running: bool) -> Table:
        """Return a table with the drift over the inputs that an unfinished measurement has run. running: whether the measurement is
        still running; if False, it was stopped.
        """
        grid = PlainTable.labelled(gap=1)
        words = extent_text(partial.extent)
        grid.add_row("so far" if running else "stopped at", Text(words, style="bold"))
        self._add_figures(grid, partial.output, partial.extent)
        if not running:
            grid.add_row("m", "measures the rest")
        return self._with_worst(grid)

    def _report(self, report: DriftReport) -> Table:
        output = report.output
        grid = PlainTable.labelled(gap=1)
        if not report.sequences.whole:
            grid.add_row("over", Text(f"{extent_text(report.sequences)}: m runs all", style="bold"))
        if report.sequences.left_out:
            grid.add_row("padding", f"{plural(report.sequences.left_out, 'position')} left out")
        floor = self.experiment.floor
        grid.add_row("meaning", Text(str(meaning(output, floor, report.modules)), style="bold"))
        if floor is not None and floor.ways:
            grid.add_row("floor", floor_text(floor))
        for verdict in verdicts(self.experiment.thresholds, output):
            grid.add_row("pass" if verdict.passed else Text("FAIL", style="bold red"), verdict.short)
        if self.experiment.results.nonfinite is not None:
            _add_nonfinite(grid, self.experiment.results.nonfinite)
        self._add_figures(grid, output, report.sequences)
        if report.settings != str(RunSettings()):
            grid.add_row("settings", report.settings)
        if report.weights_only:
            grid.add_row("quantised", "weights only")
        after = [("of", printable(f"{report.output_name}, {report.inputs}", 200))]
        if report.seconds.reference is not None and report.seconds.candidate is not None:
            partly = "the changed part: " if report.seconds.reused else ""
            words = f"{partly}{report.seconds.candidate:.2f} s (reference {report.seconds.reference:.2f} s)"
            after.append(("time", words))
        if extent := modules_extent_text(report):
            after.insert(0, ("modules", extent))
        return self._with_worst(grid, after)

    def _add_figures(self, grid: Table, output: OutputDrift, extent: Extent) -> None:
        """Add rows with the output's metrics to `grid`. extent: the inputs that they cover.

        If there is a baseline recipe, add its metrics next to those of the current recipe.
        """
        base = self.experiment.baseline
        if base is not None:
            grid.add_row("P", Text(f"{printable(str(base.recipe), 200)}: {meaning(base.output).word}", style="dim"))
        grid.add_row(
            "SQNR", _with_baseline(sqnr_text(output, extent), decibels(base.output.sqnr_db) if base else None, "bold")
        )
        for label, words in self._loss_rows():
            grid.add_row(label, Text(words, style="bold"))
        grid.add_row("mean |Δ|", f"{output.mean_abs:.4e}")
        grid.add_row("max |Δ|", _with_baseline(f"{output.max_abs:.4e}", f"{base.output.max_abs:.1e}" if base else None))
        grid.add_row("rel. L2", f"{output.rel_l2:.2e}  cosine {output.cosine:.6f}")
        if output.nonfinite:
            grid.add_row("non-finite", Text(f"{output.nonfinite:,} of {output.elements:,}", style="bold red"))
        if output.kl_mean is not None and not math.isnan(output.kl_mean):
            if base is not None and base.output.kl_mean is not None:
                kl = _with_baseline(f"{output.kl_mean:.3e}", f"{base.output.kl_mean:.1e} nats", "bold")
            else:
                kl = Text(f"{kl_text(output, extent)} nats", style="bold")
            grid.add_row("KL mean", kl)
            tail = [f"p99 {output.kl_p99:.1e}"] if output.kl_p99 is not None else []
            tail += [f"max {output.kl_max:.1e}"] if output.kl_max is not None else []
            grid.add_row("KL tail", "  ".join(tail))
        if guess := self.experiment.predicted():
            grid.add_row("predicted", f"{guess}, sum of singles")
        if output.top1_agreement is not None:
            top1 = percent_with_error(output.top1_agreement, output.top1_agreement_se)
            other_top = base.output.top1_agreement if base is not None else None
            grid.add_row("same top", _with_baseline(top1, f"{100 * other_top:.2f}" if other_top is not None else None))
        if output.perplexity_reference is not None and output.perplexity_candidate is not None:
            grid.add_row("perplexity", f"{output.perplexity_reference:.4f} → {output.perplexity_candidate:.4f}")

    def _with_worst(self, grid: Table, after: Iterable[tuple[str, str]] = ()) -> Table:
        """Add the modules that drift most to `grid`, and return it. after: rows to add after these modules.

        If the names of the modules do not fit next to their label, they get the full width of the pane.
        """
        worst, others = self.experiment.results.worst_modules(3), self.experiment.tree.modules
        labels, width = ["worst (w)"], self.columns - _LABEL_WIDTH - 1
        lines = worst_lines(worst, width, others)
        if lines is None:
            labels.append("in dB")
            lines = worst_lines(worst, width, others, unit=False) if len(worst) > 1 else None
        if lines is not None:
            for label, line in zip_longest(labels[: len(lines)], lines, fillvalue=""):
                grid.add_row(label, line)
            for row in after:
                grid.add_row(*row)
            return grid
        grid.add_row("worst (w)", "SQNR in dB")
        below = PlainTable.labelled(gap=1)
        for row in after:
            below.add_row(*row)
        whole = PlainTable.grid()
        for part in (grid, Text("\n").join(worst_lines_or_longer(worst, self.columns, others)), below):
            if isinstance(part, Table):
                part.columns[0].min_width = _LABEL_WIDTH  # aligns the labels of both tables
            whole.add_row(part)
        return whole


def _with_baseline(words: str, baseline: str | None, style: str = "") -> Text:
    """Return the metric `words` of the current recipe and, if there is a baseline recipe, the same metric of the baseline, as one
    text.
    """
    text = Text(words, style=style)
    if baseline is not None:
        text.append(f"  P {baseline}", style="not bold dim")
    return text


def _add_nonfinite(grid: Table, diagnosis: NonFiniteDiagnosis) -> None:
    """Add rows to `grid` with the operation that produces infinite or NaN values, the rules that prevent them, and the key that
    applies these rules.
    """
    grid.add_row("not finite", Text(first_sentence(diagnosis), style="bold"))
    if values := value_sentence(diagnosis):
        grid.add_row("because", values)
    for number, rule in enumerate(map(Rule.parse, diagnosis.remedy)):
        words = f"{printable(rule.pattern, 200)} → {dtypes.short_name(rule.dtype)}"
        grid.add_row("" if number else "a applies", Text(words, style="bold"))
    if not diagnosis.remedy:
        grid.add_row("no remedy", printable(diagnosis.reason, 300))
