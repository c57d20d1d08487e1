"""Formats a comparison of executions as text."""

from __future__ import annotations

from collections.abc import Sequence

from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels
from dtype_engine.reports.text_table import table_lines
from dtype_engine.results.execution import ExecutionReport, ExecutionRow
from dtype_engine.results.figures import not_always_measured
from dtype_engine.results.thresholds import Verdict

HEADINGS = ("execution", "KL (nats)", "same top-1", "SQNR", "max |Δ|", "first module that differs")


def execution_cells(row: ExecutionRow) -> tuple[str, ...]:
    """Return the text of a row for each of `HEADINGS`, without its name. A row without an output says why in the last cell."""
    output = row.output
    if output is None:
        return "", "", "", "", f"not run: {printable(row.why_not, 300)}"
    if output.max_abs == 0 and output.is_finite:
        return "0", "", "exact", "0", "none: the outputs are the same"
    kl = f"{output.kl_mean:.3e}" if output.kl_mean is not None else ""
    top = f"{100 * output.top1_agreement:.2f} %" if output.top1_agreement is not None else ""
    first = "" if row.first is None else printable(row.first, 200)
    return kl, top, decibels(output.sqnr_db), f"{output.max_abs:.3e}", first


def execution_text(report: ExecutionReport, reached: Sequence[Sequence[Verdict]]) -> str:
    """Return a table of a comparison of executions. reached: whether each row meets the limits."""
    lines = [
        f"model      {report.model} on {report.device}",
        f"rules      {', '.join(report.rules) or 'none: as stored'}",
        f"inputs     {report.inputs}",
        "base       the model by itself, one sequence at a time, in the same dtypes",
    ]
    figures = not_always_measured(row.output for row in report.rows)
    rows = [(*HEADINGS[:-1], *(figure.label for figure in figures), HEADINGS[-1])]
    for row, verdicts in zip(report.rows, reached, strict=True):
        failed = any(not verdict.passed for verdict in verdicts)
        mark = ("FAIL " if failed else "pass ") if verdicts else ""
        *cells, last = execution_cells(row)
        rows.append((f"{mark}{row.execution}", *cells, *(figure.in_column(row.output) for figure in figures), last))
    return "\n".join([*lines, *table_lines(rows, range(1, len(rows[0]) - 1))])
