"""The Drift pane: how far the model's output is from that of the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dtype_engine.core import dtypes
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, plural, scientific
from dtype_engine.recipe import Rule
from dtype_engine.reports.text_drift import extent_text, first_sentence, floor_text, value_sentence, versus
from dtype_engine.reports.text_losses import HELP as HELP_LOSSES
from dtype_engine.results.figures import FIGURES, Cell, cells, has_kl, kl_error, sqnr_error
from dtype_engine.results.meaning import HELP as HELP_MEANING
from dtype_engine.results.meaning import meaning, sqnr_limits
from dtype_engine.results.thresholds import verdicts
from dtype_tui.rendering.cells import truncate
from dtype_tui.rendering.loss_text import loss_rows
from dtype_tui.rendering.palette import ramp, verdict_pill
from dtype_tui.rendering.worst_lines import worst_lines
from dtype_tui.state.full_rows import drift_rows
from dtype_tui.state.results import sqnr_range
from dtype_tui.widgets.panes.base import Pane

if TYPE_CHECKING:
    from dtype_engine.results.attribution import NonFiniteDiagnosis
    from dtype_engine.results.drift import DriftReport, Extent, ModuleDrift, OutputDrift
    from dtype_engine.results.metrics import MetricChange

_LABEL = len("perplexity ")
_SECOND = 18
"""Width in cells of the first of two columns of metrics, including labels."""
_GAP = 2
_SECOND_LABEL = len("max |Δ| ")
_MOST_WORST = 3
_TALL = 16
"""Minimum number of lines of the pane for showing twice as many of the worst modules."""
_MOST_METRICS = 3
"""Number of the user's metrics that are shown; the details of the model list all."""
_BETWEEN = 3
"""Number of blank cells between two blocks of lines that stand side by side."""


class DriftPane(Pane):
    """Shows how far the model's output under the current recipe is from that of the reference.

    While a new recipe is cast and measured, the metrics of the previous recipe stay, dimmed. The new metrics are compared with
    these.
    """

    TITLE = "Drift"
    HELP = (
        "mean |Δ|, max |Δ|, relative L2, SQNR and cosine compare the main output with that of the reference, which vs names. "
        "KL is in nats per position, ± its standard error; while inputs remain, ± says how far the KL over all inputs may differ. "
        "a → b: from the recipe before to this one, ▲ with more drift, ▼ with less. "
        "Same top-1: share of positions at which the most likely token is the same. "
        "Confident, in place of KL p99: the mean KL where the reference gives a token 0.95 or more, if this is above the mean over "
        "all positions, or a most likely token changed there. "
        "Acceptance: how often speculative sampling keeps a token that the candidate drafts, if the settings ask for it. "
        "Your own metrics (--metric): reference → candidate, the difference ± its paired standard error, and the changed examples. "
        "Modules are compared in about a sixth of the sequences; m compares them in all. "
        "Floor: the drift of the reference against itself, under another attention implementation and in a batch of "
        "two; a drift that is not larger is noise. "
        + HELP_MEANING
        + " Causes (d): the model runs with the casts of one module at a time, and everything else as in the reference; a module's "
        "share is the drift of that output relative to the drift of the whole recipe. Shares need not add up to "
        "100 %: errors interact, and the rounding of sums and activations between modules belongs to no module. "
        + HELP_LOSSES
    )

    def corner(self, activity: str) -> Text:
        """Return how many inputs the metrics cover or, before the current recipe has metrics, what the engine is doing."""
        results = self.experiment.results
        if results.failure or self.experiment.model.no_forward:
            return Text()
        words = activity.partition(":")[0]
        if results.report is not None:
            words = extent_text(results.report.sequences).partition(",")[0]
        elif results.partial_drift is not None:
            words = extent_text(results.partial_drift.extent).partition(",")[0]
        return Text(words, "dim")

    def draw(self, activity: str, node: str) -> RenderableType:
        experiment, results = self.experiment, self.experiment.results
        failure = results.failure
        if failure is None and experiment.model.no_forward:
            why = experiment.model.no_forward.removeprefix(f"{experiment.model.title}: ")
            failure = f"Drift unknown: {printable(why, 500)}"
        if failure is not None:
            return self._arranged([[Text(failure, "bold" if results.failure else "")]])
        if results.report is not None:
            report = results.report
            figures = self._figures(report.output, report.sequences, report.modules)
            figures[0] += self._limits(report)
            figures[0] += [_metric_line(change) for change in report.metrics[:_MOST_METRICS]]
            if self.is_zoomed:
                shown = self._arranged(figures, [self._worst()])
                return Group(shown, Text(), rows_table(drift_rows(experiment)))
            return self._arranged(figures, [self._worst(), self._about(report)])
        if results.partial_drift is not None:
            output, extent = results.partial_drift.output, results.partial_drift.extent
            rest = [] if activity else [Text("Stopped before the end: m measures the rest.")]
            return self._arranged(self._figures(output, extent, results.modules.values()), [self._worst(), rest])
        if experiment.before is not None and activity:
            from dtype_engine.results.drift import worst_modules  # imported late, for a faster first paint

            before = experiment.before
            figures = self._figures(before.output, before.sequences, before.modules, compares=False)
            scale, limits = sqnr_range(before.modules), sqnr_limits(before.output)
            worst = self._worst() or worst_lines(
                worst_modules(before.modules, before.output)[:_MOST_WORST],
                self._width,
                experiment.tree.modules,
                scale,
                limits,
            )
            return self._arranged([[_dimmed(line) for line in block] for block in figures], [list(map(_dimmed, worst))])
        return self._arranged([self._waiting(activity)], [self._worst()])

    def _arranged(self, blocks: Sequence[list[Text]], others: Sequence[list[Text]] = ()) -> RenderableType:
        """Return `blocks` of lines, with the alerts below the first. `others` are to the right of the other blocks or, without
        room, below them.
        """
        alerts = list(self._alerts())
        report = self.experiment.results.report
        if others and self.corner_text and not self.is_framed and not self.is_zoomed:  # the frame would show it
            inputs = f": {printable(report.inputs, 200)}" if report is not None else ""
            words = Text(truncate(f"{self.corner_text}{inputs}", self._width), "dim")
            others = [*others[:-1], [*others[-1], words]]
        if self._width == self.columns or not others:
            return _joined([blocks[0], alerts, *blocks[1:], *others], self.columns, self.lines)
        if alerts:  # they take the whole width
            alerts, blocks = [*_in_pairs(blocks[0], self._width), *alerts], blocks[1:]
        grid = Table.grid(padding=(0, _BETWEEN, 0, 0))
        grid.add_column(width=self._width)
        grid.add_column(width=self._width)
        room = self.lines - len(alerts)
        grid.add_row(_joined(blocks, self._width, room), _joined(others, self._width, room))
        return Group(*alerts, grid)

    @property
    def _width(self) -> int:
        """The width in cells of a block of lines: half of the pane if two blocks fit side by side."""
        half = (self.columns - _BETWEEN) // 2
        return half if half >= 2 * _SECOND else self.columns

    def _waiting(self, activity: str) -> list[Text]:
        experiment = self.experiment
        if not experiment.model.live:
            return [Text("Drift appears when the model is loaded and has run.", style="dim")]
        stopped = "Stopped before the end: press m." if experiment.results.modules else "Not measured: press m."
        lines = [Text(activity or stopped, style="dim")]
        if guess := experiment.predicted():
            lines.append(Text(f"scan predicts {guess}", style="bold"))
        return lines

    def _worst(self) -> list[Text]:
        results = self.experiment.results
        most = 2 * _MOST_WORST if self.is_zoomed or self.lines >= _TALL else _MOST_WORST
        if not results.modules:
            return []
        others, worst = self.experiment.tree.modules, results.worst_modules(most)
        return worst_lines(worst, self._width, others, results.sqnr_range, results.sqnr_limits)

    def _alerts(self) -> Iterator[Text]:
        """Yield the lines about weight values that casts make infinite or zero or clip, and about outputs that are not finite."""
        results = self.experiment.results
        losses = results.losses
        for label, words in loss_rows(losses.values, losses.reason, results.loss_remedy, results.loss_remedy_next):
            yield Text.assemble((f"{label} " if label else "", "bold"), words)
        measured = results.report or results.partial_drift
        if measured is not None and not measured.output.is_finite:
            yield Text.assemble(("not finite ", "bold red"), measured.output.nonfinite_text)
        if results.nonfinite is not None:
            yield from _nonfinite_lines(results.nonfinite)

    def _limits(self, report: DriftReport) -> list[Text]:
        """Return the lines that say whether the user's limits are met: one line if it has room for all."""
        limits = [
            Text.assemble(("pass", "bold green") if verdict.passed else ("FAIL", "bold red"), f" {verdict.short}")
            for verdict in verdicts(self.experiment.thresholds, report.output, report.metrics)
        ]
        line = Text("  ").join(limits)
        return [line] if limits and line.cell_len <= self._width else limits

    def _figures(
        self, output: OutputDrift, extent: Extent, modules: Iterable[ModuleDrift], compares: bool = True
    ) -> list[list[Text]]:
        """Return blocks of lines with the metrics of the output: first the most important metric and the rating of the drift, then
        the other metrics. compares: whether to show the change from the previous recipe.
        """
        before = self._comparable() if compares else None
        head = _main_lines(output, extent, before, versus(self.experiment.model.reference), self._width)
        rating = meaning(output, self.experiment.floor, modules)
        head.append(Text.assemble(verdict_pill(rating.word), f" {rating.why}"))
        if (base := self.experiment.baseline) is not None:
            kl = f"KL {scientific(base.output.kl_mean)}  " if base.output.kl_mean is not None else ""
            words = f"{kl}{decibels(base.output.sqnr_db)}  {meaning(base.output).word}"
            head.append(Text.assemble(("P ", "bold"), f"{words}  {printable(str(base.recipe), 200)}", style="dim"))
            head[-1].truncate(self._width, overflow="ellipsis")
        if guess := self.experiment.predicted():
            head.append(Text.assemble(("scan predicts ", "dim"), guess))
        return [head, _other_figures(output, extent, self._width)]

    def _comparable(self) -> OutputDrift | None:
        """Return the output's drift under the recipe and settings before the current ones, or None if there were no others."""
        before, report = self.experiment.before, self.experiment.results.report
        if before is None:
            return None
        is_same = report is not None and (before.rules, before.settings) == (report.rules, report.settings)
        return None if is_same else before.output

    def _about(self, report: DriftReport) -> list[Text]:
        floor = self.experiment.floor
        rows = []
        if report.reference not in dtypes.BY_NAME:
            rows.append(("reference", printable(report.reference, 200)))
        if floor is not None and floor.ways:
            rows.append(("floor", floor_text(floor)))
        if (kernels := self.experiment.results.kernels) is not None and kernels.ways:
            within = ", so the drift is within it" if kernels.explains(report.output) else ""
            rows.append(("other kernels", f"{floor_text(kernels)}{within}"))
        if not report.sequences.whole:
            rows.append(("m", "measures the rest"))
        if report.settings != str(RunSettings()):
            rows.append(("settings", report.settings))
        if report.sequences.left_out:
            rows.append(("padding", f"{plural(report.sequences.left_out, 'position')} left out"))
        if self.is_framed:
            rows.append(("inputs", truncate(printable(report.inputs, 200), self._width - len("inputs "))))
        return [Text.assemble((f"{label} ", "dim"), words) for label, words in rows]


def rows_table(rows: Sequence[tuple[str, Text | str]]) -> Table:
    from dtype_tui.rendering.plain_table import PlainTable

    table = PlainTable.labelled(gap=1)
    for label, words in rows:
        table.add_row(label, words)
    return table


def _joined(blocks: Sequence[list[Text]], columns: int, lines: int) -> Text:
    """Join blocks of lines to one text. If `lines` has no room for blank lines between all blocks, only the first get them."""
    filled = [block for block in blocks if block]
    room = lines - sum(-(-max(1, line.cell_len) // columns) for block in filled for line in block)
    joined = Text()
    for index, block in enumerate(filled):
        joined.append("" if not index else "\n\n" if index <= room else "\n")
        joined.append_text(Text("\n").join(block))
    return joined


def _in_pairs(lines: Sequence[Text], width: int) -> list[Text]:
    """Return the lines, two of them beside each other where both have room in `width` cells."""
    paired: list[Text] = []
    left: Text | None = None
    for line in lines:
        if left is not None and line.cell_len <= width:
            left.pad_right(width + _BETWEEN - left.cell_len)
            left.append_text(line)
            left = None
        else:
            left = line.copy() if line.cell_len <= width else None
            paired.append(left or line)
    return paired


def _dimmed(line: Text) -> Text:
    return Text(line.plain, "dim")


def _main_lines(
    output: OutputDrift, extent: Extent, before: OutputDrift | None, reference: str, width: int
) -> list[Text]:
    """Return the mean KL or, if there is none, the SQNR, with the reference and its error. A line of `width` cells that has no room
    for both leaves out the error; the reference then gets a line of its own, if need be. before: the drift to compare with.
    """
    row, label, error, unit = FIGURES["sqnr_db"], "SQNR ", sqnr_error(output, extent), ""
    form: Callable[[float], str] = decibels
    if has_kl(output):
        known = kl_error(output, extent)
        row, label, unit = FIGURES["kl_mean"], "KL ", " nats"
        error = "" if known is None else f" ± {scientific(known, 0)}"
        form = scientific
    earlier, now = (None if each is None else row.of(each) for each in (before, output))
    assert now is not None
    shown = None if earlier is None else form(earlier).removesuffix(" dB")
    figure = _change(shown, form(now), earlier is not None and row.worsened(earlier, now))

    def line(after: str) -> Text:
        return Text.assemble((label, "dim"), figure, (after, "dim"))

    for one in map(line, (f"{error}{unit} {reference}", f"{unit} {reference}")):
        if one.cell_len <= width:
            return [one]
    return [line(f"{error}{unit}"), Text(truncate(reference, width), "dim")]


def _change(before: str | None, now: str, worsened: bool) -> Text:
    """Return a figure, and the change from its earlier value if there is one: `2.20e-5 → 2.61e-5 ▲` if it has worsened."""
    if before is None or before == now:
        return Text(now, "bold")
    mark, colour = ("▲", ramp("broken")) if worsened else ("▼", ramp("exact"))
    return Text.assemble((f"{before} → ", "dim"), (now, "bold"), (f" {mark}", colour))


def _metric_line(metric: MetricChange) -> Text:
    error = "" if metric.error is None else f" ± {metric.error:.1g}"
    return Text.assemble(
        (f"{printable(metric.name, 24)} ", "dim"),
        f"{metric.reference:.4g} → {metric.candidate:.4g}",
        (f"  {metric.difference:+.2g}{error}, {metric.changed:,} of {metric.examples:,} changed", "dim"),
    )


def _other_figures(output: OutputDrift, extent: Extent, columns: int) -> list[Text]:
    """Return lines with the less important metrics of the output, two in each line if `columns` cells have room for them."""
    shown = cells("pane" if has_kl(output) else "pane_without_kl", output, extent)
    if has_kl(output):
        right = [cell for cell in shown if cell.figure.about == "values"]
        left = [cell for cell in shown if cell.figure.about != "values"]
    else:
        left, right = shown[::2], shown[1::2]
    if columns < 2 * _SECOND:
        return [_figure(cell, _LABEL) for cell in (*left, *right)]
    lines = []
    for one, other in zip_longest(left, right):
        line = _figure(one, _LABEL) if one is not None else Text()
        if other is not None:
            line.pad_right(_SECOND + _GAP - len(line))
            line.append_text(_figure(other, _SECOND_LABEL))
        lines.append(line)
    return lines


def _figure(cell: Cell, width: int) -> Text:
    return Text.assemble((f"{cell.label:<{width - 1}} ", "dim"), cell.text)


def _nonfinite_lines(diagnosis: NonFiniteDiagnosis) -> Iterator[Text]:
    """Yield lines with the operation that produces infinite or NaN values, and the rules that prevent these values."""
    yield Text.assemble(("not finite ", "bold red"), first_sentence(diagnosis))
    if values := value_sentence(diagnosis):
        yield Text.assemble(("because ", "dim"), values)
    for number, rule in enumerate(map(Rule.parse, diagnosis.remedy)):
        words = f"{printable(rule.pattern, 200)} → {dtypes.short_name(rule.dtype)}"
        yield Text.assemble(("          " if number else "a applies ", "bold"), words)
    if not diagnosis.remedy:
        yield Text.assemble(("no remedy ", "dim"), printable(diagnosis.reason, 300))
