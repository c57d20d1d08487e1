"""Writes the list of the modules that drift most: for each module, a line with its SQNR and the end of its name. If other modules'
names end alike, the full name follows on further lines.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels
from dtype_tui.rendering.cells import wrap_dotted

if TYPE_CHECKING:
    from dtype_engine.results.drift import ModuleDrift

_NUMBER_WIDTH = 10


def shortened_uniquely(name: str, width: int, others: Collection[str]) -> str | None:
    """Return a module's name shortened to `width` cells by cutting off its beginning, as in `…10.mlp.down_proj`.

    Returns None if the shortened name is ambiguous because another name in `others` has the same end.
    """
    if len(name) <= width:
        return name
    end = name
    while end and len(end) >= width:
        end = end.partition(".")[2]
    if not end or any(other.endswith(f".{end}") and other != name for other in others):
        return None
    return f"…{end}"


def worst_lines(
    worst: Sequence[ModuleDrift], width: int, others: Collection[str], unit: bool = True
) -> list[Text] | None:
    """Return one line per module with its SQNR and its shortened name, or None if one of the shortened names is ambiguous.

    worst: the modules to list. others: the names of all modules. unit: whether to write the unit of the SQNR.
    """
    numbers = _numbers(worst, unit)
    widest = _NUMBER_WIDTH if unit else max(map(len, numbers), default=0)
    lines = []
    for drift, number in zip(worst, numbers, strict=True):
        number = f"{number:>{widest}} "
        name = shortened_uniquely(printable(drift.name, 300), width - len(number), others)
        if name is None:
            return None
        lines.append(_line(drift, number, name))
    return lines


def worst_lines_or_longer(worst: Sequence[ModuleDrift], width: int, others: Collection[str]) -> list[Text]:
    """Return a text per module: a line with its SQNR without unit and its shortened name or, if the shortened name is ambiguous, a
    line with the SQNR and below it the full name, wrapped. worst: the modules to list. others: the names of all modules.
    """
    numbers = _numbers(worst, unit=False)
    widest = max(map(len, numbers), default=0)
    lines = []
    for drift, number in zip(worst, numbers, strict=True):
        name = printable(drift.name, 300)
        short = shortened_uniquely(name, width - widest - 1, others)
        below = "\n  " + wrap_dotted(name, width - 2).replace("\n", "\n  ")
        lines.append(_line(drift, f"{number:>{widest}} ", below if short is None else short))
    return lines


def _numbers(worst: Sequence[ModuleDrift], unit: bool) -> list[str]:
    words = ["not finite" if drift.nonfinite else decibels(drift.sqnr_db) for drift in worst]
    return words if unit else [number.replace(" dB", "") for number in words]


def _line(drift: ModuleDrift, number: str, name: str) -> Text:
    return Text.assemble((number, "bold" if drift.nonfinite else ""), (name, "dim"))
