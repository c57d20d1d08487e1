"""The window that compares executions of the current recipe."""

from __future__ import annotations

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
    grid.add_column(overflow="fold")
    grid.add_row(*HEADINGS, style="dim")
    width = Overlay.content_width(answer.width) // 3
    for row in report.rows:
        *figures, last = execution_cells(row)
        name = Text(printable(row.execution), style="bold")
        grid.add_row(name, *figures, wrap_dotted(last, width) if row.first is not None else last)
    words = Text(
        "\nall with the dtypes of the recipe, against the model by itself, one sequence at a time", style="dim"
    )
    words.append(f"\n{printable(report.inputs, 300)}; {printable(report.device)}")
    whole = PlainTable.grid()
    whole.add_row(grid)
    whole.add_row(words)
    return Overlay("The same weights, executed otherwise", whole)
