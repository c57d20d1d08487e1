"""The window that shows the problems found by checking the model's files, grouped by kind."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.check import KINDS, CheckReport
from dtype_tui.rendering.cells import wrap_dotted
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.overlay import Answer, Overlay

_SHOWN = 50
"""Maximum number of findings of one kind that are shown."""


def check_screen(answer: Answer[None, CheckReport]) -> Overlay:
    """Return a window that shows what a check of the model's files found, by kind, and why it matters."""
    report = answer.result
    read = f"{plural(report.tensors, 'header')} and {plural(report.scales, 'tensor')} of scales were read"
    words = Text(
        "No problems were found.\n" if not report.findings else f"{plural(len(report.findings), 'finding')}.\n",
        style="bold",
    )
    words.append(f"{report.coverage}; {read}" if report.coverage is not None else read, style="dim")
    for sentence in report.unchecked:
        words.append(f"\nNot checked: {printable(sentence, 1000)}", style="dim")
    parts: list[RenderableType] = [words]
    for kind, row in KINDS.items():
        found = [finding for finding in report.findings if finding.kind == kind]
        if not found:
            continue
        title = Text(f"\n{row.title}: {len(found):,}", style="bold")
        title.append(f"\n{row.why}", style="dim")
        if row.seen:
            title.append(f"\nSeen in {', '.join(row.seen)}", style="dim")
        grid = PlainTable.grid(padding=(0, 2))
        grid.add_column(overflow="fold")
        grid.add_column(overflow="fold")
        for finding in found[:_SHOWN]:
            name = wrap_dotted(printable(finding.tensor, 500), Overlay.content_width(answer.width) // 2)
            grid.add_row(name, printable(finding.what, 1000))
        parts += [title, grid]
        if len(found) > _SHOWN:
            parts.append(Text(f"and {len(found) - _SHOWN:,} more", style="dim"))
    return Overlay("Check of the model's files", Group(*parts))
