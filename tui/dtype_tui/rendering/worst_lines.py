"""Writes the list of the modules that drift most: for each module, a line with its SQNR and the end of its name."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from dtype_engine.core.text import printable
from dtype_tui.rendering.cells import drift_share, meter, wrap_dotted
from dtype_tui.rendering.palette import sqnr_colour

if TYPE_CHECKING:
    from dtype_engine.results.drift import ModuleDrift
    from dtype_engine.results.meaning import Word

_LABELS = ("worst", "dB")
_LABEL = 6
"""Width in cells of the labels in front of the numbers."""
_TRACK = 4
"""Width in cells of the bar that shows a module's drift."""


def shortened_uniquely(name: str, width: int, others: Collection[str]) -> str | None:
    """Return a name or, if it is too wide, its end: `…10.mlp.down_proj`. None if that is empty or not unique in `others`."""
    if len(name) <= width:
        return name
    end = name
    while end and len(end) >= width:
        end = end.partition(".")[2]
    if not end or any(other.endswith(f".{end}") and other != name for other in others):
        return None
    return f"…{end}"


def worst_lines(
    worst: Sequence[ModuleDrift],
    width: int,
    others: Collection[str],
    scale: tuple[float, float],
    limits: Sequence[tuple[float, Word]],
) -> list[Text]:
    """Return lines about the modules that drift most: a label, the SQNR in dB, a bar for the drift, and the end of the name.

    If a shortened name could mean several modules, the bars are left out, so that more of each name fits. If it is still ambiguous,
    the full name follows on further lines.

    others: the names of all modules. scale: the SQNRs in dB at which a bar is full and at which it is empty. limits: the minimum
    SQNR of each rating, such as (40.0, "small").
    """
    numbers = [drift.sqnr_text.removesuffix(" dB") for drift in worst]
    widest = max(map(len, numbers), default=0)
    names = [printable(drift.name, 300) for drift in worst]
    for track in (_TRACK, 0):
        room = width - _LABEL - widest - 1 - (track + 1 if track else 0)
        short = [shortened_uniquely(name, room, others) for name in names]
        if None not in short:
            break
    lines = []
    for index, (drift, number, name) in enumerate(zip(worst, numbers, names, strict=True)):
        label = _LABELS[index] if index < len(_LABELS) else ""
        degree = drift.sqnr_db if drift.is_finite and drift.sqnr_db is not None else math.nan
        colour = sqnr_colour(degree, limits)
        line = Text.assemble((f"{label:<{_LABEL}}", "dim"), (f"{number:>{widest}} ", f"bold {colour}"))
        if track:
            line = Text.assemble(line, *meter(drift_share(degree, scale), track, colour), " ")
        line.append(short[index] or "\n  " + wrap_dotted(name, width - 2).replace("\n", "\n  "))
        lines.append(line)
    return lines
