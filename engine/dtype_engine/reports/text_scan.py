"""Reports of scans and searches for a terminal, in plain columns."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes, seconds_text, with_error
from dtype_engine.reports.text_losses import loss_lines
from dtype_engine.results.scan import FrontPoint, ScanReport, SearchReport, WeightScore


def scan_text(report: ScanReport, rows: int = 20) -> str:
    """Sums by dtype, and the weights that matter most."""
    how = "each measured alone" if report.exact else f"estimated, {report.draws} backward passes a sequence"
    passes = report.scan_seconds / report.forward_seconds if report.forward_seconds else math.nan
    lines = [
        f"model      {report.model} on {report.device}; reference {report.reference}",
        f"inputs     {report.inputs}" + (
            f"; {report.sequences} of {report.all_sequences} sequences" if report.sequences < report.all_sequences else ""
        ),
        f"scores     {report.unit}, {how}",
        f"seconds    {seconds_text(report.scan_seconds)}, that of {passes:.1f} forward passes",
        "",
    ]  # fmt: skip
    sums: dict[str, list[float]] = defaultdict(list)
    for weight in report.weights:
        sums[weight.dtype].append(weight.score)
    lines.append("all weights in one dtype, by the sum of their scores")
    width = max((len(dtypes.short_name(dtype)) for dtype in sums), default=0)
    lines += [
        f"  {dtypes.short_name(dtype):<{width}}  {math.fsum(found):.4e}"
        for dtype, found in sorted(sums.items(), key=lambda item: math.fsum(item[1]))
        if dtype in report.dtypes
    ]
    ranked = sorted(report.weights, key=lambda weight: -weight.score)
    lines += ["", f"what matters most ({min(rows, len(ranked))} of {len(ranked)})", *_table(ranked[:rows])]
    return "\n".join(lines)


def _table(weights: Sequence[WeightScore]) -> list[str]:
    if not weights:
        return []
    name = max(len(printable(weight.name)) for weight in weights)
    badge = max(len(dtypes.short_name(weight.dtype)) for weight in weights)
    return [
        f"  {printable(weight.name):<{name}}  {dtypes.short_name(weight.dtype):<{badge}}  {human_bytes(weight.bytes):>10}  "
        f"{with_error(weight.score, weight.error)}"
        for weight in weights
    ]


def search_text(report: SearchReport) -> str:
    """What was found, predicted beside measured, and the front in a dozen steps."""
    lines = [
        f"model      {report.model}",
        f"memory     stored {human_bytes(report.stored_bytes)} → planned {human_bytes(report.planned_bytes)}",
        f"predicted  {report.predicted:.4e} {report.unit}",
    ]
    if report.measured is not None:
        lines.append(f"measured   {report.measured:.4e} {report.unit}")
    lines += ["rules", *(f"  {printable(rule)}" for rule in report.rules or ("none: as stored",))]
    lines += [*loss_lines(report.lost), "", "Pareto front"]
    lines += [f"  {human_bytes(point.bytes):>10}  {point.predicted:.4e}" for point in _some(report.front, 12)]
    return "\n".join(lines)


def _some(points: Sequence[FrontPoint], most: int) -> list[FrontPoint]:
    """The first, the last, and others evenly between them."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]
