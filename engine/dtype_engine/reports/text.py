"""Formats results as text for a terminal, in plain columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Totals
from dtype_engine.core.units import decibels, human_bytes, less_error, percent, plural, seconds_text, share_text
from dtype_engine.reports.text_drift import modules_extent_text
from dtype_engine.reports.text_groups import group_lines
from dtype_engine.reports.text_losses import loss_lines
from dtype_engine.reports.text_table import table_lines
from dtype_engine.results.coverage import Coverage
from dtype_engine.results.figures import About, cells

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport, ImplicitCastStats, ModuleDrift
    from dtype_engine.results.rounding import WeightGain
    from dtype_engine.results.runs import Generation, SpeedReport, SpeedRow
    from dtype_engine.results.weights import SkippedTensor, WeightError


def mix_text(totals: Totals) -> str:
    """Return each dtype's share of the bytes, as in `bf16 83 % · f32 17 %`, or only the name if there is one dtype."""
    shares = totals.mix()
    if len(shares) == 1:
        return dtypes.short_name(shares[0][0])
    return " · ".join(f"{dtypes.short_name(name)} {percent(share)} %" for name, share in shares)


def found_text(coverage: Coverage | None) -> str:
    """Return words to show after a model's name, such as `; 56 of 56 tensors found`, or "" if there is no coverage."""
    return f"; {coverage}" if coverage is not None else ""


def generation_text(text: Generation) -> str:
    """Return the texts with which both models continue a prompt. In both texts, the first token that differs is in brackets."""
    lines = [f"prompt     {_one_line(text.prompt)}"]
    for name, written in (("reference", text.reference), ("candidate", text.candidate)):
        same = text.same_tokens
        parts = list(written.pieces)
        if text.differs and same < len(parts):
            parts[same] = f"⟦{parts[same]}⟧"
        rate = len(parts) / written.seconds if written.seconds else 0.0
        lines.append(f"{name}  {_one_line(''.join(parts))}")
        lines.append(f"           {len(parts)} tokens in {written.seconds:.2f} s, {rate:.1f} a second")
    lines.append("           " + parting(text))
    return "\n".join(lines)


def parting(text: Generation) -> str:
    """Return a sentence that says at which token both texts begin to differ."""
    if not text.differs:
        return f"the same {plural(len(text.reference.ids), 'token')}"
    if text.same_tokens < 2:
        return "the first token is the same; token 2 differs" if text.same_tokens else "the first token differs"
    return f"the first {text.same_tokens:,} tokens are the same; token {text.same_tokens + 1:,} differs"


def _one_line(text: str) -> str:
    return printable(text.replace("\n", "⏎"), 10_000)


def weights_text(errors: Sequence[WeightError], gains: Sequence[WeightGain] = ()) -> str:
    """Return a table of the tensors that a cast changes, with the errors of their values. Higher SQNRs come first. If there are
    gains of roundings, the table has a column for them.
    """
    if not errors:
        return "no tensor changes: give a cast that matches some, such as --cast '*=float16'"
    head = ("tensor", "cast", "SQNR", "max |Δ|", "mean |Δ|", "→ inf", "clipped", "→ 0", "subnormal", "not finite")
    gained = {(each.name, dtypes.unrounded(each.dtype)): each for each in gains}
    rows: list[tuple[str, ...]] = [(*head, "rounding") if gains else head]
    for error in sorted(errors, key=lambda error: math.inf if error.sqnr_db is None else -error.sqnr_db):
        cast = f"{dtypes.short_name(error.stored)}→{dtypes.short_name(error.dtype)}"
        sqnr = "-" if error.sqnr_db is None else decibels(error.sqnr_db)
        counts = (error.overflowed, error.saturated, error.underflowed, error.subnormal, error.nonfinite)
        shares = (share_text(count, error.elements) for count in counts)
        rounding = [_gain_text(gained.get((error.name, error.dtype)))] if gains else []
        figures = (f"{error.max_abs:.3e}", f"{error.mean_abs:.3e}", *shares, *rounding)
        rows.append((printable(error.name, 100), cast, sqnr, *figures))
    return "\n".join(table_lines(rows, range(2, len(head))))


def _gain_text(gain: WeightGain | None) -> str:
    if gain is None or gain.gain is None:
        return "-"
    return f"{dtypes.BY_NAME[gain.dtype].rounding}: {less_error(gain.gain)}"


def skipped_text(skipped: Sequence[SkippedTensor]) -> str:
    """Return one line with the number of tensors that are never cast, the name of the first one, and the reason."""
    first = skipped[0]
    return f"left out   {plural(len(skipped), 'tensor')}, first {printable(first.name, 100)}: {first.why}"


def speed_text(report: SpeedReport) -> str:
    """Return a table with the times of forward passes in each variant, compared with the reference."""
    lines = [
        f"model      {report.model} on {report.device}, {report.threads} threads",
        f"rules      {', '.join(report.rules) or 'none: as stored'}",
        f"inputs     {report.inputs}",
    ]
    width = max(len(row.dtypes) for row in report.rows) if report.rows else 0
    lines += [f"{row.what:<10} {row.dtypes:<{width}}  {'  '.join(speed_cells(row, report))}" for row in report.rows]
    return "\n".join(lines)


def speed_cells(row: SpeedRow, report: SpeedReport) -> list[str]:
    """Return the median time with its range, the tokens per second, and the speed relative to the first row."""
    cells = [
        f"{seconds_text(row.seconds)} ({seconds_text(row.fastest)} to {seconds_text(row.slowest)}, {row.repeats} passes)"
    ]
    if row.tokens_per_second is not None:
        cells.append(f"{row.tokens_per_second:,.0f} tokens/s")
    first = report.rows[0]
    if row is not first and row.seconds and first.seconds:
        ratio = first.seconds / row.seconds
        cells.append(f"{ratio:.2f} x as fast" if ratio >= 1 else f"{1 / ratio:.2f} x slower")
    if row.under_rules:
        cells.append("with casts that plain torch does not make")
    return cells


def cache_change_text(before: int, after: int, context: int) -> str:
    """Return words with the bytes of a KV cache before (without rules) and after (under a recipe), and the number of tokens."""
    sizes = human_bytes(before) if before == after else f"{human_bytes(before)} → {human_bytes(after)}"
    return f"{sizes} for one sequence of {context:,} tokens"


NOT_COUNTED = f"{'lost':<10} not counted: the values that the casts make infinite or zero"
WEIGHTS_ONLY = "weights only: what a runtime does to activations (W8A8, W4A4) comes on top"


def drift_text(report: DriftReport, positions: bool = False) -> str:
    """Return the metrics of a measurement, and a table of the modules with the lowest SQNR. positions: whether to show the drift by
    position in the sequence, too.
    """
    from dtype_engine.core.execution import names_axis  # the first paint needs neither
    from dtype_engine.results.drift import first_different, worst_modules

    output, memory = report.output, report.memory
    itself = ", itself not finite" if output.nonfinite_reference else ""
    lines = [
        f"model      {report.model} on {report.device}; reference {report.reference}{itself}{found_text(report.coverage)}",
        f"rules      {', '.join(report.rules) or 'none: as stored'}",
        *([f"quantized  {WEIGHTS_ONLY}"] if report.weights_only else []),
        *([f"settings   {report.settings}"] if report.settings != "defaults" else []),
        f"inputs     {report.inputs_run}",
        f"output     {report.output_name}, {output.elements:,} elements",
        *_figure_lines(report, "values"),
        f"non-finite {output.nonfinite_text}",
        *(loss_lines(report.lost) if report.lost is not None else [NOT_COUNTED]),
    ]
    lines += _figure_lines(report, "distribution")
    if not report.sequences.whole and (error := report.sequences.error) is not None:
        lines.append(f"           over all inputs it may be {100 * error:.1f} % more or less: one standard error")
    lines += _figure_lines(report, "predictions")
    lines += group_lines(output, "confidence", *(("position",) if positions else ()))
    if positions and not output.groups.get("position"):
        lines.append("positions  none: the output has no finite distributions along sequences")
    lines += [f"draft head {report.draft}"] if report.draft is not None else []
    lines += [f"{'metric':<10} {printable(change.name)} {change}" for change in report.metrics]
    lines.append(
        f"memory     stored {human_bytes(memory.stored_bytes or 0)} → planned {human_bytes(memory.planned_bytes or 0)}; "
        f"resident {human_bytes(memory.resident_bytes or 0)}; process peak {human_bytes(memory.peak_rss_bytes or 0)}"
        + ("" if memory.device_peak_bytes is None else f"; device peak {human_bytes(memory.device_peak_bytes)}")
    )
    if memory.cache_planned_bytes is not None:
        change = cache_change_text(
            memory.cache_stored_bytes or 0, memory.cache_planned_bytes, memory.cache_context or 0
        )
        lines.append(f"KV cache   {change}; the rules give a format to {memory.cast_caches:,} of its tensors")
    if report.seconds.reference is not None and report.seconds.candidate is not None:
        partly = " (only what changed was run)" if report.seconds.reused else ""
        lines.append(
            f"seconds    reference {report.seconds.reference:.3f}, candidate {report.seconds.candidate:.3f}{partly}"
        )
    if names_axis(report.settings) and (first := first_different(report.modules)) is not None:
        lines.append(f"first      {printable(first)} is the first module whose output differs")
    if worst := worst_modules(report.modules, output)[:8]:
        extent = modules_extent_text(report)
        how = f" (modules: {extent}; --modules exact compares all)" if extent else ""
        lines.append(f"worst modules by SQNR{how}")
        lines += table_lines(
            [(printable(each.name), _module_figures(each)) for each in worst],
            indent="  ",
        )
    return "\n".join(lines)


def _module_figures(drift: ModuleDrift) -> str:
    itself = f"  {drift.nonfinite_reference:,} values in the reference itself" if drift.nonfinite_reference else ""
    return f"{drift.sqnr_text}{itself or f'  max |Δ| {drift.max_abs:.3e}'}"


def _figure_lines(report: DriftReport, about: About) -> list[str]:
    return [f"{cell.label:<10} {cell.text}" for cell in cells("text", report.output, report.sequences, about)]


def flow_text(casts: Sequence[ImplicitCastStats]) -> str:
    """Return a table of implicit casts, in the given order."""
    if not casts:
        return "no implicit casts: every operation was given one dtype"
    rows = [("module", "operation", "from → to", "elements", "times", "plain torch")]
    for cast in casts:
        change = f"{dtypes.short_name(cast.source)} → {dtypes.short_name(cast.target)}"
        name = printable(cast.module, 200) or "the model"
        rows.append((name, cast.operation, change, f"{cast.elements:,}", str(cast.count), cast.in_torch))
    return "\n".join(table_lines(rows, (3, 4)))
