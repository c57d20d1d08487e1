"""The modules that drift most, a line each where their names can be told apart in it."""

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


def told_apart(name: str, width: int, others: Collection[str]) -> str | None:
    """A module's name in `width` cells, its beginning cut off where it has to be, as `…10.mlp.down_proj`; None where what is left
    could be another's.
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
    readings: Sequence[ModuleDrift], width: int, others: Collection[str], unit: bool = True
) -> list[Text] | None:
    """SQNR, with its unit or without, and the name beside it; None where a name can't be told from the `others` there."""
    numbers = _numbers(readings, unit)
    widest = _NUMBER_WIDTH if unit else max(map(len, numbers), default=0)
    lines = []
    for reading, number in zip(readings, numbers, strict=True):
        number = f"{number:>{widest}} "
        name = told_apart(printable(reading.name, 300), width - len(number), others)
        if name is None:
            return None
        lines.append(_line(reading, number, name))
    return lines


def worst_lines_or_longer(readings: Sequence[ModuleDrift], width: int, others: Collection[str]) -> list[Text]:
    """SQNR without its unit, and the name beside it, or below it in full where that can't be told from the `others`."""
    numbers = _numbers(readings, unit=False)
    widest = max(map(len, numbers), default=0)
    lines = []
    for reading, number in zip(readings, numbers, strict=True):
        name = printable(reading.name, 300)
        beside = told_apart(name, width - widest - 1, others)
        below = "\n  " + wrap_dotted(name, width - 2).replace("\n", "\n  ")
        lines.append(_line(reading, f"{number:>{widest}} ", below if beside is None else beside))
    return lines


def _numbers(readings: Sequence[ModuleDrift], unit: bool) -> list[str]:
    words = ["not finite" if reading.nonfinite else decibels(reading.sqnr_db) for reading in readings]
    return words if unit else [number.replace(" dB", "") for number in words]


def _line(reading: ModuleDrift, number: str, name: str) -> Text:
    return Text.assemble((number, "bold" if reading.nonfinite else ""), (name, "dim"))
