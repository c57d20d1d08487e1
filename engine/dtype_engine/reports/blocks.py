"""The parts of a report, independent of its format: sections with sentences, tables and charts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Grade = Literal["", "green", "yellow", "orange", "red"]
"""The color of a tile's mark. The tile's words say the same, so that the color can be ignored. "" is no color."""


class Identifier(str):
    """A name in the model, or a pattern. Reports format it as code, and never interpret it as markup."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. The columns from index `numbers` on are right-aligned; with -1, none are."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: int = -1


@dataclass(frozen=True, slots=True)
class StackedBars:
    """Stacked bars on one scale, one below the other."""

    title: str
    bars: tuple[tuple[str, tuple[tuple[str, float, str], ...]], ...]
    """(label, pieces) of each bar. A piece is (name, size, text that shows both)."""


@dataclass(frozen=True, slots=True)
class BarChart:
    """One value for each name, in order, or None if the name has no value. A larger value is better."""

    title: str
    points: tuple[tuple[str, float | None], ...]
    unit: str


@dataclass(frozen=True, slots=True)
class Tile:
    """An answer in large type, with what it is about above it and details below it."""

    label: str
    value: str
    details: tuple[str, ...] = ()
    grade: Grade = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the blocks under it."""

    title: str
    blocks: tuple[str | Table | StackedBars | BarChart, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report: a title, tiles, a summary in one sentence, and sections."""

    title: str
    summary: str
    sections: tuple[Section, ...]
    tiles: tuple[Tile, ...] = ()
