"""Formats the measurements of many recipes as text for a terminal: a table, and a plot drawn with characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes, perplexity_text
from dtype_engine.reports.text_table import table_lines
from dtype_engine.results.figures import not_always_measured
from dtype_engine.results.sweep import SweepReport, SweepRow

_WIDTH, _HEIGHT = 60, 12


def sweep_text(report: SweepReport) -> str:
    """Return a table of recipes, smallest first, and a plot of drift over bytes. `*` marks recipes that no other recipe beats."""
    lines = [
        f"model      {report.model}, stored {human_bytes(report.stored_bytes)}",
        f"inputs     {report.inputs}",
        f"drift      {report.unit}; * no other is smaller and no worse",
        "",
    ]
    figures = not_always_measured(row.output for row in report.rows)
    perplexity = any(row.output.perplexity_candidate is not None for row in report.rows)
    rows = [
        (
            "*" if row.best else " ", printable(row.recipe), human_bytes(row.planned_bytes), f"{row.drift:.4e}",
            *((perplexity_text(row.output.perplexity_candidate or math.nan),) if perplexity else ()),
            *(figure.in_column(row.output) for figure in figures),
            *(change.short for change in row.metrics),
        )
        for row in report.rows
    ]  # fmt: skip
    head = (" ", "recipe", "planned", "drift", *(("perplexity",) if perplexity else ()))
    head += tuple(figure.label for figure in figures)
    head += tuple(printable(change.name) for change in report.rows[0].metrics)
    return "\n".join([*lines, *table_lines([head, *rows], (2, 3, 4)), *_plot(report.rows)])


def _plot(rows: Sequence[SweepRow]) -> list[str]:
    shown = [row for row in rows if 0 < row.drift < math.inf]
    if len(shown) < 2:
        return []
    across = [row.planned_bytes for row in shown]
    up = [math.log10(row.drift) for row in shown]
    cells = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    # The best recipes are drawn last, so that they stay visible where two fall on one cell.
    for row in sorted(shown, key=lambda row: row.best):
        column = _place(row.planned_bytes, min(across), max(across), _WIDTH)
        line = _place(math.log10(row.drift), min(up), max(up), _HEIGHT)
        cells[_HEIGHT - 1 - line][column] = "*" if row.best else "o"
    labels = {0: f"{10 ** max(up):.1e}", _HEIGHT - 1: f"{10 ** min(up):.1e}"}
    left, right = human_bytes(min(across)), human_bytes(max(across))
    return [
        "",
        *(f"{labels.get(number, ''):>8} |{''.join(line).rstrip()}" for number, line in enumerate(cells)),
        f"{'':>8} +{'-' * _WIDTH}",
        f"{'':>10}{left}{right:>{_WIDTH - len(left)}}",
    ]


def _place(value: float, least: float, most: float, cells: int) -> int:
    return 0 if most == least else round((value - least) / (most - least) * (cells - 1))
