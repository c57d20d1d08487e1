"""Plots points in terminal cells, with eight braille dots per cell. The labels on an axis never touch each other. The vertical axis
is linear, or logarithmic with a separate line for zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from dtype_engine.core.units import scientific
from dtype_tui.rendering.palette import TRACK

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a braille character, by row and column."""
_BRAILLE = 0x2800
_GRID = "┈"
"""The character of the faint lines at the labels of the vertical axis."""
_GAP = 2
"""Minimum number of cells between two labels of the horizontal axis."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points to draw, if they are finite. On a logarithmic axis, points whose y is zero have a separate line at the bottom."""

    points: Sequence[tuple[float, float]]
    """(x, y) of each point."""
    mark: str = ""
    """The character that marks each point. If "", a line of dots joins the points instead."""
    style: str = ""
    styles: Sequence[str] = ()
    """The style of each point and of the line that leads to it from the previous point. If empty, all points have `style`."""


@dataclass(frozen=True, slots=True)
class Note:
    """A text that is written near a point."""

    x: float
    y: float
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Axes:
    """The ranges of a plot's axes."""

    left: float
    right: float
    low: float
    """The lower end of the vertical axis; on a logarithmic one, the logarithm to base ten."""
    high: float
    """The upper end of the vertical axis; on a logarithmic one, the logarithm to base ten."""
    zero: bool
    """Whether points whose y is zero have a separate line at the bottom."""
    linear: bool = False

    def level(self, y: float) -> float | None:
        """Return `y` in the units of `low` and `high` (its logarithm on a logarithmic axis), or None if it is drawn as zero."""
        if self.linear:
            return y
        return None if y <= 0 or math.log10(y) < self.low - 1e-9 else math.log10(y)


def axes_around(points: Sequence[tuple[float, float]]) -> Axes:
    """Return axes for all finite points: x linear, y logarithmic. A y of up to a millionth of the largest is drawn as zero."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    left, right = _sides(finite)
    most = max((y for _, y in finite), default=0.0)
    least = most / 1e6
    over = [y for _, y in finite if y > least]
    zero = any(y <= least for _, y in finite)
    low, high = (math.log10(min(over)), math.log10(max(over))) if over else (-1.0, 0.0)
    if high - low < 0.2:
        low, high = low - 0.1, high + 0.1
    return Axes(left, right, low, high, zero)


def linear_axes(points: Sequence[tuple[float, float]]) -> Axes:
    """Return linear axes that contain every finite point."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    low, high = min((y for _, y in finite), default=0.0), max((y for _, y in finite), default=1.0)
    if high - low < 1e-6 * max(1.0, abs(high)):
        low, high = low - 1.0, high + 1.0
    return Axes(*_sides(finite), low, high, zero=False, linear=True)


def _sides(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    left, right = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=1.0)
    if right - left <= 1e-6 * max(abs(left), abs(right)):
        return (0.9 * left, 1.1 * right) if left > 0 else (left - 0.5, right + 0.5)
    return left, right


def plot(
    series: Sequence[Series],
    axes: Axes,
    width: int,
    height: int,
    vertical: float | None = None,
    names: Sequence[tuple[float, str]] = (),
    unit: str = "",
    notes: Sequence[Note] = (),
) -> Text:
    """Return the plot as `height` lines of `width` cells. vertical: the x at which to draw a vertical line. names: (x, name) in
    order of x, to write below the axis instead of numbers. unit: the unit of y, written after the uppermost label.
    """
    labels = _y_labels(axes, max(1, height - 2 - axes.zero))
    if unit and labels:
        top = min(labels)
        labels = {row: f"{label} {unit if row == top else ' ' * len(unit)}" for row, label in labels.items()}
    margin = max(len(label) for label in (*labels.values(), "0")) + 1
    columns, rows = max(1, width - margin - 1), max(1, height - 2 - axes.zero)
    grid = _Grid(columns, rows, axes)
    if vertical is not None and axes.left <= vertical <= axes.right:
        for row in range(rows + axes.zero):
            grid.put(grid.column(vertical), row, "|", "yellow")
    for each in series:
        grid.draw(each)
    for note in notes:
        grid.write(note)
    text = Text()
    for row in range(rows + axes.zero):
        label = "0" if row == rows else labels.get(row, "")
        text.append(f"{label:>{margin - 1}} ", style="dim")
        text.append("┤" if label else "│", style=TRACK)
        text.append_text(grid.line(row, _GRID if row in labels else " "))
        text.append("\n")
    text.append(" " * margin + "└" + "─" * columns + "\n", style=TRACK)
    text.append(" " * (margin + 1) + (_names_below(axes, columns, names) or _x_labels(axes, columns)), style="dim")
    return text


class _Grid:
    """The cells of a plot inside its axes. The separate line for zero, if there is one, is the last row."""

    def __init__(self, columns: int, rows: int, axes: Axes) -> None:
        self._columns, self._rows, self._axes = columns, rows, axes
        self._dots: dict[tuple[int, int], int] = {}
        self._styles: dict[tuple[int, int], str] = {}
        self._marks: dict[tuple[int, int], tuple[str, str]] = {}

    def column(self, x: float) -> int:
        return min(self._columns - 1, self._across(x) // 2)

    def _across(self, x: float) -> int:
        """Return the column of dots for an x. Columns are counted from the left, two per cell."""
        axes = self._axes
        return round((x - axes.left) / (axes.right - axes.left) * (2 * self._columns - 1))

    def _down(self, y: float) -> int | None:
        """Return the row of dots for a y, or None if the y is drawn as zero. Rows are counted from the top, four per cell."""
        axes, level = self._axes, self._axes.level(y)
        return None if level is None else round((axes.high - level) / (axes.high - axes.low) * (4 * self._rows - 1))

    def put(self, column: int, row: int, mark: str, style: str) -> None:
        if 0 <= column < self._columns and 0 <= row <= self._rows:
            self._marks[column, row] = mark, style

    def draw(self, series: Series) -> None:
        axes = self._axes
        before: tuple[int, int] | None = None
        styles = series.styles or [series.style] * len(series.points)
        for (x, y), style in zip(series.points, styles, strict=True):
            if not (axes.left <= x <= axes.right and math.isfinite(y)):
                before = None
                continue
            across, down = self._across(x), self._down(y)
            if down is not None and down < 0:
                before = None
            elif series.mark:
                row = self._rows if down is None else down // 4
                self.put(across // 2, row, series.mark, style)
            elif down is None:
                self._dot(across, 4 * self._rows + 1, style)
                before = None
            else:
                self._join(before or (across, down), (across, down), style)
                before = across, down

    def _join(self, one: tuple[int, int], other: tuple[int, int], style: str) -> None:
        steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]), 1)
        for step in range(steps + 1):
            share = step / steps
            self._dot(round(one[0] + share * (other[0] - one[0])), round(one[1] + share * (other[1] - one[1])), style)

    def _dot(self, across: int, down: int, style: str) -> None:
        cell = across // 2, down // 4
        self._dots[cell] = self._dots.get(cell, 0) | _DOTS[down % 4][across % 2]
        self._styles[cell] = style

    def write(self, note: Note) -> None:
        """Write a note inside the plot where it covers the fewest dots and marks; of such places, take the nearest to its point."""
        down = self._down(note.y)
        width = len(note.text)
        if down is None or width > self._columns:
            return
        column, row = self.column(note.x), down // 4
        starts = {
            max(0, min(start, self._columns - width)) for start in (column, column - width // 2, column - width + 1)
        }
        places = [
            (sum((cell, near) in self._dots or (cell, near) in self._marks for cell in range(start, start + width)),
             abs(near - row), start, near)
            for near in range(self._rows)
            for start in starts
            if near != row
        ]  # fmt: skip
        if places:
            _, _, start, near = min(places)
            for index, character in enumerate(note.text):
                self.put(start + index, near, character, note.style)

    def line(self, row: int, blank: str) -> Text:
        """Return a row of cells. blank: the character where nothing is drawn."""
        text = Text()
        for column in range(self._columns):
            cell = column, row
            if cell in self._marks:
                text.append(*self._marks[cell])
            elif cell in self._dots:
                text.append(chr(_BRAILLE + self._dots[cell]), style=self._styles[cell])
            else:
                text.append(blank, style=TRACK)
        return text


def _y_labels(axes: Axes, rows: int) -> dict[int, str]:
    """Return the labels of the vertical axis by row, from the top, none in neighboring rows. All are round numbers."""
    if axes.linear:
        levels = _ticks(axes.low, axes.high, rows // 3)
    else:
        levels = [(math.log10(value), label) for value, label in _logarithmic_ticks(axes.low, axes.high, rows // 2)]
    labels: dict[int, str] = {}
    for level, label in reversed(levels):
        row = round((axes.high - level) / (axes.high - axes.low) * (4 * rows - 1)) // 4
        if not labels or row > max(labels) + 1:
            labels[row] = label
    return labels


def _ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Return round numbers from `low` to `high` with their texts: at most `most`, but two if `most` is less. They are multiples of
    1, 2 or 5 times a power of ten or, if there are fewer than two of these, the first and the last multiple of the step below.
    """
    most = max(2, most)
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    finer: list[tuple[float, str]] = []
    for step in (power * times for times in (0.5, 1, 2, 5, 10, 20)):
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        found = [(index * step, f"{index * step + 0.0:.{digits}f}") for index in range(first, last + 1)]
        if len(found) <= most:
            return found if len(found) > 1 else [finer[0], finer[-1]]
        finer = found
    return [finer[0], finer[-1]]


def _logarithmic_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Return round numbers on a logarithmic axis with their texts: powers of ten or, if there are fewer than two, 1, 2 and 5 times
    powers of ten or, if there are fewer than two of these, as `_ticks`. low, high: logarithms to base ten.
    """
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    if last > first:
        step = max(1, math.ceil((last - first + 1) / max(1, most)))
        return [(10.0**power, f"1e{power}") for power in reversed(range(last, first - 1, -step))]
    between = [(times * 10.0**power, f"{times}e{power}") for power in range(first - 1, last + 1) for times in (1, 2, 5)]
    inside = [(value, label) for value, label in between if low - 1e-9 <= math.log10(value) <= high + 1e-9]
    if len(inside) > 1:
        return inside
    found = [(value, len(text.partition(".")[2])) for value, text in _ticks(10**low, 10**high, most)]
    return [
        (value, scientific(value, max(0, digits + math.floor(math.log10(value) + 1e-9)))) for value, digits in found
    ]


def _names_below(axes: Axes, columns: int, names: Sequence[tuple[float, str]]) -> str:
    """Return the line of names below the axis, `columns` wide. Each name starts at its x; names without room are left out."""
    line = ""
    for x, name in names:
        start = min(round((x - axes.left) / (axes.right - axes.left) * (columns - 1)), columns - len(name))
        if start >= 0 and (not line or start >= len(line) + _GAP):
            line = f"{line:<{start}}{name}"
    return f"{line:<{columns}}" if line else ""


def _x_labels(axes: Axes, columns: int) -> str:
    """Return the line of round numbers below the axis, `columns` wide, each centred at its x but kept inside the line."""
    line = ""
    for x, label in _ticks(axes.left, axes.right, columns // 14):
        middle = round((x - axes.left) / (axes.right - axes.left) * (columns - 1))
        start = min(max(0, middle - len(label) // 2), columns - len(label))
        if start >= 0 and (not line or start >= len(line) + _GAP):
            line = f"{line:<{start}}{label}"
    return f"{line:<{columns}}"
