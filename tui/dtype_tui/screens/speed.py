"""The window with the times of forward passes."""

from __future__ import annotations

from rich.text import Text

from dtype_engine.core.text import printable
from dtype_engine.core.units import seconds_text
from dtype_engine.results.runs import SpeedReport
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.overlay import Answer, Overlay


def speed_screen(answer: Answer[None, SpeedReport]) -> Overlay:
    """Return a window with the times of forward passes. The last column compares each row with the first, the reference."""
    report = answer.result
    grid = PlainTable.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for _ in range(4):
        grid.add_column(no_wrap=True, justify="right")
    tokens = any(row.tokens_per_second for row in report.rows)
    grid.add_row("", "dtypes", "median", "fastest to slowest", "tokens/s" if tokens else "", "speed", style="dim")
    first = report.rows[0] if report.rows else None
    for row in report.rows:
        rate = f"{row.tokens_per_second:,.0f}" if row.tokens_per_second is not None else ""
        ratio = f"{first.seconds / row.seconds:.2f} x" if first is not None and row.seconds else ""
        spread = f"{seconds_text(row.fastest)} to {seconds_text(row.slowest)}"
        what = Text(printable(row.what, 200), style="bold")
        grid.add_row(what, printable(row.dtypes, 200), seconds_text(row.seconds), spread, rate, ratio)
    where = printable(f"{report.inputs}; {report.device}, {report.threads} threads", 500)
    words = Text(f"\nafter a warm-up; {where}", style="dim")
    if any(row.under_rules for row in report.rows):
        words.append("\nThis mix does not run in plain torch: its time includes the casts that make it run.")
    for notice in report.notices:
        words.append(f"\n{printable(notice, 1000)}")
    whole = PlainTable.grid()
    whole.add_row(grid)
    whole.add_row(words)
    return Overlay("Forward passes over all inputs, timed", whole)
