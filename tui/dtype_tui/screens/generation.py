"""The window with the texts that the reference and the candidate generate."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from dtype_engine.core.text import printable
from dtype_engine.core.units import seconds_text
from dtype_engine.reports.text import parting
from dtype_engine.results.runs import Generation, Written
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.overlay import Overlay


def generation_screen(texts: Sequence[Generation]) -> Overlay:
    """Return a window with both texts side by side for each prompt. The first token that differs is in brackets."""
    grid = PlainTable.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_column(ratio=1, overflow="fold")
    for number, text in enumerate(texts):
        if number:
            grid.add_row("", "")
        grid.add_row(Text("reference", style="bold"), Text("candidate", style="bold"))
        grid.add_row(_written(text, text.reference), _written(text, text.candidate))
        grid.add_row(*(Text(_pace(written), style="dim") for written in (text.reference, text.candidate)))
        grid.add_row(Text(parting(text), style="bold" if text.differs else ""), "")
    return Overlay("Greedy text after the first prompt" if len(texts) == 1 else "Greedy text after each prompt", grid)


def _written(text: Generation, written: Written) -> Text:
    """Return the end of the prompt, dim, and the generated text after it, both without control characters."""
    shown = Text(_safe_lines("…" + text.prompt[-60:] if len(text.prompt) > 60 else text.prompt), style="dim")
    for index, piece in enumerate(written.pieces):
        if text.differs and index == text.same_tokens:
            shown.append(f"⟦{_safe_lines(piece)}⟧", style="bold reverse")
        else:
            shown.append(_safe_lines(piece), style="not dim")
    return shown


def _safe_lines(text: str) -> str:
    return "\n".join(printable(line, 2000) for line in text.split("\n"))


def _pace(written: Written) -> str:
    rate = len(written.ids) / written.seconds if written.seconds else 0.0
    return f"{len(written.ids)} tokens, {seconds_text(written.seconds)}, {rate:.0f}/s"
