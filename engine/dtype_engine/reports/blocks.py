"""What a report is made of: sections of sentences, tables and charts, before they are HTML or Markdown."""

from __future__ import annotations

from dataclasses import dataclass


class Identifier(str):
    """A name of the model's, or a pattern: set apart from words, and never taken for anything but text."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. Columns from `numbers` on are set to the right; -1 for none."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: int = -1


@dataclass(frozen=True, slots=True)
class StackedBars:
    """Bars of the same scale, one below the other, each of pieces (name, size); `unit` says what a size is, in words."""

    title: str
    bars: tuple[tuple[str, tuple[tuple[str, float, str], ...]], ...]


@dataclass(frozen=True, slots=True)
class BarChart:
    """A value for each of many names, in their order; None where there is none. Larger is better."""

    title: str
    points: tuple[tuple[str, float | None], ...]
    unit: str


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what is under it."""

    title: str
    blocks: tuple[str | Table | StackedBars | BarChart, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole: what it is of, a sentence that says the most important, and the sections."""

    title: str
    summary: str
    sections: tuple[Section, ...]
