"""The building blocks of a report, independent of its file format: tiles, and sections with sentences, tables and charts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtype_engine.results.pictures import Picture

Grade = Literal["", "green", "yellow", "orange", "red"]
"""The color of the mark on a tile, or "" for none. The tile's words have the same meaning, so that the color can be ignored."""


class Identifier(str):
    """The name of a module or tensor of the model, or a pattern. Reports format it as code, and never interpret it as markup."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text. The columns from index `numbers` on are right-aligned; with -1, no column is."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: int = -1


@dataclass(frozen=True, slots=True)
class StackedBars:
    """A chart of horizontal bars on one scale. Each bar is divided into segments, such as bytes by dtype."""

    title: str
    bars: tuple[tuple[str, tuple[tuple[str, float, str], ...]], ...]
    """(label, segments) of each bar. A segment is (name, size, text that shows both)."""


@dataclass(frozen=True, slots=True)
class BarChart:
    """A chart with one value for each name, in order. The value is None if it is unknown."""

    title: str
    points: tuple[tuple[str, float | None], ...]
    unit: str
    worst: Literal["lowest", "highest"] = "lowest"
    """Which values are marked and named."""
    form: str = ".2f"
    """The format of values."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures side by side."""

    title: str
    pictures: tuple[tuple[str, Picture], ...]
    """(label, picture) of each picture."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A box at the top of a report: its subject (`label`), one answer in large type (`value`), and lines of details."""

    label: str
    value: str
    details: tuple[str, ...] = ()
    grade: Grade = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and the paragraphs, tables and charts below it."""

    title: str
    blocks: tuple[str | Table | StackedBars | BarChart | Pictures, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report: a title, tiles, a summary in one sentence, and sections."""

    title: str
    summary: str
    sections: tuple[Section, ...]
    tiles: tuple[Tile, ...] = ()
