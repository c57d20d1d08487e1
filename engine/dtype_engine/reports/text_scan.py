"""Formats scans and searches as text for a terminal, in plain columns."""

from __future__ import annotations

import math

from dtype_engine.core import dtypes
from dtype_engine.core.bandwidth import milliseconds
from dtype_engine.core.kv_formats import SCANNED
from dtype_engine.core.text import printable
from dtype_engine.core.units import (
    bandwidth_text,
    human_bytes,
    less_error,
    plural,
    seconds_text,
    token_time,
    with_error,
)
from dtype_engine.recipe.loading import LOADERS
from dtype_engine.reports.text import found_text
from dtype_engine.reports.text_losses import loss_lines
from dtype_engine.reports.text_table import table_lines
from dtype_engine.results.figures import not_always_measured
from dtype_engine.results.scan import ScanReport, SearchReport, at_even_steps

_ROWS = 20


def scan_text(report: ScanReport) -> str:
    """Return a scan as text: the sum of all weights' scores in each dtype, and the weights with the highest scores."""
    how = "each measured alone" if report.exact else f"estimated, {report.draws} backward passes a sequence"
    passes = report.scan_seconds / report.forward_seconds if report.forward_seconds else math.nan
    lines = [
        f"model      {report.model} on {report.device}; reference {report.reference}{found_text(report.coverage)}",
        f"inputs     {report.inputs}" + (
            f"; {report.sequences} of {report.all_sequences} sequences" if report.sequences < report.all_sequences else ""
        ),
        f"scores     {report.unit}, {how}",
        f"seconds    {seconds_text(report.scan_seconds)}, that of {passes:.1f} forward passes",
        "",
    ]  # fmt: skip
    lines.append(f"{totals_heading(report)}, by the sum of their scores")
    lines += table_lines([(dtypes.short_name(dtype), f"{total:.4e}") for total, dtype in report.totals()], indent="  ")
    ranked = sorted(report.weights, key=lambda weight: -weight.score)
    known = any(weight.rounding_gain is not None for weight in report.weights)
    gain = "; last, what the rounding does to the squared error of the layer's output" if known else ""
    lines += ["", f"what matters most ({min(_ROWS, len(ranked))} of {len(ranked)}){gain}"]
    cells = [
        (
            printable(weight.name), dtypes.short_name(weight.dtype), f"{human_bytes(weight.bytes):>10}",
            with_error(weight.score, weight.error),
            *(["" if weight.rounding_gain is None else less_error(weight.rounding_gain)] if known else []),
        )
        for weight in ranked[:_ROWS]
    ]  # fmt: skip
    return "\n".join([*lines, *table_lines(cells, (2,), indent="  "), *_experts(report)])


def _experts(report: ScanReport) -> list[str]:
    """Return a table of how many tokens the experts of at most twelve layers got, or [] for a model without experts."""
    if not report.experts:
        return []
    rows = [(printable(each.module), *each.spread) for each in at_even_steps(report.experts, 12)]
    heading = ("tokens of an expert", "fewest", "median", "most")
    return ["", *table_lines([heading, *rows], (1, 2, 3))]


def totals_heading(report: ScanReport) -> str:
    """Return a heading for the sums of a scan's scores, such as "all weights in one dtype"."""
    of_caches = {dtype.startswith(SCANNED) for dtype in report.dtypes}
    if len(of_caches) > 1:
        return "all weights, or all KV caches (kv:), in one dtype"
    return "all KV caches in one dtype" if True in of_caches else "all weights in one dtype"


def search_text(report: SearchReport) -> str:
    """Return the best recipe, its predicted and measured drift, and at most twelve points of the Pareto front."""
    lines = [
        f"model      {report.model}{found_text(report.coverage)}",
        f"memory     stored {human_bytes(report.stored_bytes)} → planned {human_bytes(report.planned_bytes)}",
        f"loads in   {LOADERS[report.formats]}",
        f"predicted  {report.predicted:.4e} {report.unit}",
    ]
    if report.active_bytes is not None and _shows_active(report):
        lines.insert(2, f"active     {human_bytes(report.active_bytes)} of the weights are read for a token")
        if report.bandwidth is not None:
            least = token_time(milliseconds(report.active_bytes, report.bandwidth))
            lines[2] += f"; at {bandwidth_text(report.bandwidth)}, that takes at least {least}"
    if report.context is not None:
        lines[1] += f", of which KV cache {human_bytes(report.cache_bytes)} at {plural(report.context, 'token')}"
    if report.measured is not None:
        lines.append(f"measured   {report.measured:.4e} {report.unit}")
        figures = not_always_measured([report.output])
        lines += [f"{row.label:<10} {row.in_column(report.output)}" for row in figures]
        lines += [f"metric     {printable(change.name)} {change}" for change in report.metrics]
    if report.candidates:
        lines += ["", f"measured on {report.held_out}"]
        figures = not_always_measured(each.output for each in report.candidates)
        names = [*(row.label for row in figures), *(printable(change.name) for change in report.metrics)]
        rows = [
            (
                "*" if (each.planned_bytes, each.measured) == (report.planned_bytes, report.measured) else " ",
                human_bytes(each.planned_bytes), f"{each.predicted:.4e}", f"{each.measured:.4e}",
                *(row.in_column(each.output) for row in figures), *(change.short for change in each.metrics),
            )
            for each in report.candidates
        ]  # fmt: skip
        lines += [*table_lines([(" ", "planned", "predicted", "measured", *names), *rows], (1, 2, 3)), ""]
    lines += ["rules", *(f"  {printable(rule, len(rule))}" for rule in report.rules or ("none: as stored",))]
    lines += [*loss_lines(report.lost), "", *_front(report)]
    return "\n".join(lines)


def _shows_active(report: SearchReport) -> bool:
    """Return whether a token reads other bytes than all of them, or the user asks for its time."""
    return report.bandwidth is not None or any(point.active_bytes not in (None, point.bytes) for point in report.front)


def _front(report: SearchReport) -> list[str]:
    """Return a heading and at most twelve points of the Pareto front: bytes, those that a token reads, its time, and drift."""
    points, bandwidth = at_even_steps(report.front, 12), report.bandwidth
    names, rows = [], []
    for point in points:
        active = point.active_bytes if _shows_active(report) else None
        cells = [] if active is None else [human_bytes(active)]
        cells += [] if active is None or bandwidth is None else [f"{milliseconds(active, bandwidth):.3g} ms"]
        names = ["active", "at least"][: len(cells)]
        rows.append((human_bytes(point.bytes), *cells, f"{point.predicted:.4e}"))
    heading = [("planned", *names, "predicted")] if names else []
    return ["Pareto front", *table_lines([*heading, *rows], tuple(range(len(names) + 1)), indent="  ")]
