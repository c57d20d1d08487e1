"""Plots in cells: where points stand, and which labels are there."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtype_tui.config.ascii import line_in_ascii
from dtype_tui.rendering.canvas import Axes, Series, axes_around, linear_axes, plot
from dtype_tui.rendering.palette import TRACK

WIDTH, HEIGHT = 60, 14
points = st.lists(
    st.tuples(
        st.floats(0.001, 1e6), st.one_of(st.just(0.0), st.floats(1e-12, 10.0), st.just(math.inf), st.just(math.nan))
    ),
    min_size=1,
    max_size=12,
)


def lines_of(series: list[Series], width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    drawn = [point for each in series for point in each.points]
    return plot(series, axes_around(drawn), width, height).plain.split("\n")


@given(points, st.integers(24, 140), st.integers(6, 40))
def test_plot_has_the_requested_size_and_its_axis_labels_do_not_touch(
    shown: list[tuple[float, float]], width: int, height: int
) -> None:
    lines = lines_of([Series(shown), Series(shown, "x")], width, height)
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)
    labels = lines[-1].split()
    assert labels == re.findall(r"\d+(?:\.\d+)?", lines[-1])
    assert [float(label) for label in labels] == sorted(float(label) for label in labels)
    assert not any(mark in lines[-1] + lines[-2] for mark in "x┤")


def test_marks_in_a_plot_are_drawn_at_the_rows_and_columns_of_their_values() -> None:
    lines = lines_of([Series([(1.0, 1e-1), (2.0, 1e-2), (3.0, 1e-3)], "x")])
    rows = [index for index, line in enumerate(lines) if "x" in line]
    columns = [lines[row].index("x") for row in rows]
    assert 0 < rows[2] - rows[1] - (rows[1] - rows[0]) + 2 < 4
    assert columns[1] - columns[0] in (
        columns[2] - columns[1] - 1,
        columns[2] - columns[1],
        columns[2] - columns[1] + 1,
    )
    assert [lines[row].split("┤")[0].strip() for row in rows] == ["1e-1", "1e-2", "1e-3"]
    assert lines[-1].split() == ["1", "2", "3"]


def test_zero_and_tiny_values_are_plotted_on_a_separate_line() -> None:
    lines = lines_of([Series([(1.0, 1e-1), (2.0, 1e-3)], "x"), Series([(3.0, 0.0)], "o"), Series([(4.0, 1e-9)], "t")])
    (zero,) = (line for line in lines if line.lstrip().startswith("0 ┤"))
    assert "o" in zero
    assert "t" in zero
    assert "x" not in zero
    assert not any(line.lstrip().startswith("0 ┤") for line in lines_of([Series([(1.0, 1e-1)], "x")]))


def test_nonfinite_points_are_not_drawn() -> None:
    assert not any("x" in line for line in lines_of([Series([(1.0, math.inf), (2.0, math.nan)], "x")]))


def test_lines_are_plotted_with_braille_dots() -> None:
    curve = [(x / 50, 10 ** (-x / 25)) for x in range(100)]
    drawn = plot([Series(curve)], axes_around(curve), WIDTH, HEIGHT).plain
    braille = [character for character in drawn if 0x2800 < ord(character) < 0x2900]
    assert len({bin(ord(character) - 0x2800).count("1") for character in braille}) > 1
    assert len(braille) > WIDTH - 12
    plain = "".join(line_in_ascii(drawn))
    assert plain.isascii()
    assert plain.count(".") >= len(braille)


@pytest.mark.slow
@given(points, st.integers(30, 140), st.integers(6, 40))
def test_linear_axis_has_round_labels_in_equal_steps(shown: list[tuple[float, float]], width: int, height: int) -> None:
    axes = linear_axes(shown)
    lines = plot([Series(shown, "x")], axes, width, height).plain.split("\n")
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)
    labels = [(row, float(line.split("┤")[0])) for row, line in enumerate(lines) if "┤" in line]
    figures = [figure for _, figure in labels]
    assert len(labels) <= height / 2
    assert figures == sorted(set(figures), reverse=True)
    for row, figure in labels:
        place = (axes.high - figure) / (axes.high - axes.low) * (height - 3)
        assert abs(row - place) < 1.01


@given(st.floats(1e-3, 1e6), st.floats(1e-9, 10.0), st.integers(30, 140))
def test_labels_of_the_horizontal_axis_are_round_and_distinct(left: float, share: float, width: int) -> None:
    axes = axes_around([(left, 1.0), (left * (1 + share), 2.0)])
    labels = plot([], axes, width, HEIGHT).plain.split("\n")[-1].split()
    figures = [Decimal(label) for label in labels]
    assert len(set(labels)) == len(labels) >= 1
    if len(figures) > 1:
        step = figures[1] - figures[0]
        assert {b - a for a, b in pairwise(figures)} == {step}
        assert all(figure % step == 0 for figure in figures) or len(figures) == 2


def test_axis_of_nearly_equal_sizes_has_distinct_labels() -> None:
    axes = axes_around([(2.69998, 1e-3), (2.70003, 2e-3)])
    assert plot([], axes, 60, HEIGHT).plain.split("\n")[-1].split() == ["2.69998", "2.70000", "2.70002"]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1e-6, 1e-2, ["1e-2", "1e-3", "1e-4", "1e-5", "1e-6"]),
        (1.3e-3, 7e-3, ["5e-3", "2e-3"]),
        (2.71e-3, 2.9e-3, ["3.5e-3", "3.0e-3", "2.5e-3"]),
    ],
)
def test_logarithmic_axis_has_round_and_distinct_labels(low: float, high: float, labels: list[str]) -> None:
    lines = plot([], axes_around([(1.0, low), (2.0, high)]), WIDTH, HEIGHT).plain.split("\n")
    assert [line.split("┤")[0].strip() for line in lines if "┤" in line] == labels


@given(st.floats(-8, 2), st.floats(0.2, 9), st.integers(4, 40))
def test_every_logarithmic_axis_has_two_labels_or_more(low: float, span: float, height: int) -> None:
    axes = Axes(0.0, 1.0, low, low + span, zero=False)
    lines = plot([], axes, WIDTH, height).plain.split("\n")
    labels = [line.split("┤")[0].strip() for line in lines if "┤" in line]
    assert len(labels) >= (2 if height > 8 else 1)
    assert len(set(labels)) == len(labels)
    assert all(10**low * 0.99 <= float(label) <= 10 ** (low + span) * 1.01 for label in labels)


def test_faint_lines_lead_from_the_labels_across_the_plot() -> None:
    shown = [(0.0, 0.0), (4.0, 40.0)]
    drawn = plot([Series(shown)], linear_axes(shown), 40, 17)
    rows = [line for line in drawn.plain.split("\n") if "┤" in line]
    assert len(rows) > 2
    assert all(line.count("┈") > 25 for line in rows)
    assert drawn.plain.count("┈") == sum(line.count("┈") for line in rows)
    assert all(span.style == TRACK for span in drawn.spans if "┈" in drawn.plain[span.start : span.end])


def test_linear_axis_draws_negative_values_at_their_place() -> None:
    lines = plot(
        [Series([(0, -20), (1, 0), (2, 40)], "x")], linear_axes([(0, -20), (1, 0), (2, 40)]), 40, 17
    ).plain.split("\n")
    beside = [line.split("┤")[0].strip() for line in lines if "x" in line]
    assert beside == ["40", "0", "-20"]


def test_names_below_a_plot_do_not_touch() -> None:
    names = [(index, f"layers.{index}") for index in range(12)]
    shown = [(float(index), index) for index in range(12)]
    below = plot([Series(shown)], linear_axes(shown), 60, 10, names=names).plain.split("\n")[-1]
    assert below.split() == ["layers.0", "layers.2", "layers.4", "layers.6", "layers.8"]
    inside = 60 - below.index("layers.0")
    assert abs(below.index("layers.6") - below.index("layers.0") - 6 / 11 * inside) < 2
