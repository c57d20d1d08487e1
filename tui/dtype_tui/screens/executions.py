"""The window that compares executions of the current recipe."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dtype_engine.core.text import printable
from dtype_engine.reports.text_execution import HEADINGS, execution_cells
from dtype_engine.results.execution import ExecutionReport
from dtype_tui.rendering.cells import wrap_dotted
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.overlay import Answer, Overlay


def executions_screen(answer: Answer[None, ExecutionReport]) -> Overlay:
    """Return a window that shows how far the outputs of the same weights move under other executions."""
    report = answer.result
    grid = PlainTable.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    for _ in HEADINGS[1:-1]:
        grid.add_column(no_wrap=True, justify="right")
    grid.add_row(*HEADINGS[:-1], style="dim")
    parts: list[RenderableType] = [grid]
    for row in report.rows:
        grid.add_row(Text(printable(row.execution), style="bold"), *execution_cells(row)[:-1])
    width = Overlay.content_width(answer.width)
    parts += [Text(f"\n{HEADINGS[-1]}", style="dim"), _remarks(report, width)]
    words = Text(
        "\nall with the dtypes of the recipe, against the model by itself, one sequence at a time", style="dim"
    )
    words.append(f"\n{printable(report.inputs, 300)}; {printable(report.device)}")
    return Overlay("The same weights, executed otherwise", Group(*parts, words))


def _remarks(report: ExecutionReport, width: int) -> Table:
    """Return a table with what is said of each execution: the first module that differs, or why it was not run."""
    grid = PlainTable.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in report.rows:
        last = execution_cells(row)[-1]
        grid.add_row(printable(row.execution), wrap_dotted(last, width - 26) if row.first is not None else last)
    return grid
