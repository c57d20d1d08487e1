"""Figures in words."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.recording_engine import report

from dtype_engine.core.units import (
    change_text,
    decibels,
    human_bytes,
    human_count,
    less_error,
    percent_with_error,
    plural,
    signed,
)
from dtype_engine.recipe import Recipe
from dtype_engine.reports.text import drift_text
from dtype_engine.reports.text_scan import search_text
from dtype_engine.reports.text_table import table_lines
from dtype_engine.results.drift import ModuleDrift, worst_modules
from dtype_engine.results.scan import SearchReport


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (999, "999"), (1000, "1 k"), (999_949, "999.9 k"), (999_950, "1 M"), (671_026_419_200, "671 B"),
     (6_740_000_000, "6.7 B"), (10**12, "1 T"), (10**15, "1000 T")],
)  # fmt: skip
def test_large_counts_are_shortened_with_a_unit(count: int, shown: str) -> None:
    assert human_count(count) == shown


@pytest.mark.parametrize(("value", "shown"), [(-0.001, "0.00 dB"), (-0.01, "-0.01 dB"), (46.5, "46.50 dB")])
def test_decibels_have_no_negative_zero(value: float, shown: str) -> None:
    assert decibels(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(-0.0001, "+0.00"), (0.0, "+0.00"), (-0.3, "-0.30"), (12.345, "+12.35")])
def test_signed_numbers_have_no_negative_zero(value: float, shown: str) -> None:
    assert signed(value, 2) == shown


@pytest.mark.parametrize(
    ("gain", "shown"),
    [
        (3.2, "3.20x less error"), (1234.5, "1,234x less error"), (0.5, "2.00x more error"), (1.004, "same error"),
        (1.0, "same error"), (0.0, "more error"), (math.inf, "no error"),
    ],
)  # fmt: skip
def test_change_of_an_error_is_a_factor_and_a_direction(gain: float, shown: str) -> None:
    assert less_error(gain) == shown


@given(st.integers(0, 10**15))
def test_shortened_counts_are_accurate_to_two_digits(count: int) -> None:
    number, _, unit = human_count(count).partition(" ")
    assert unit in ("", "k", "M", "B", "T")
    assert float(number) * 1000 ** " kMBT".index(unit or " ") == pytest.approx(count, rel=0.051, abs=0.5)
    assert human_bytes(count).endswith("B")


def test_text_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("name", "bytes", ""), ("a", "1", "x"), ("longer", "123456", "")]
    assert table_lines(rows, {1}, indent=" ") == [" name     bytes", " a            1  x", " longer  123456"]
    assert table_lines([]) == []


def test_modules_are_sorted_from_most_to_least_drift() -> None:
    figures: dict[str, tuple[float | None, int]] = {
        "same": (math.inf, 0),
        "other tokens": (None, 0),
        "good": (60.0, 0),
        "nothing left": (0.0, 0),
        "bad": (-3.0, 0),
        "one": (50.0, 1),
        "many": (None, 9),
        "zeros": (-math.inf, 0),
    }
    drifts = [ModuleDrift(name, sqnr, 0.0, nonfinite) for name, (sqnr, nonfinite) in figures.items()]
    assert [each.name for each in worst_modules(drifts)] == ["many", "one", "zeros", "bad", "nothing left", "good"]


def test_module_whose_output_is_that_of_a_child_is_not_listed() -> None:
    drifts = [
        ModuleDrift(name, sqnr, 0.5, 0)
        for name, sqnr in (("layer", 30.0), ("layer.mlp", 20.0), ("layer.mlp.down", 20.0), ("layer.mlp2", 20.0))
    ]
    assert [each.name for each in worst_modules(drifts)] == ["layer.mlp.down", "layer.mlp2", "layer"]


def test_many_equally_bad_modules_are_sorted_quickly() -> None:
    """As in a model that drifts from its first layer on. Comparing all pairs takes minutes."""
    names = [
        f"layer.{layer}.expert.{expert}{part}" for layer in range(60) for expert in range(256) for part in ("", ".up")
    ]
    worst = {each.name for each in worst_modules([ModuleDrift(name, None, math.nan, 8) for name in names])}
    assert worst == {name for name in names if name.endswith(".up")}


def test_change_of_bytes_is_given_as_percent_less_or_more() -> None:
    assert [change_text(*pair) for pair in ((200, 90), (100, 300), (5, 5), (0, 7))] == [
        "55.0 % less",
        "200.0 % more",
        "",
        "",
    ]


def test_plurals_and_percentages_with_errors_are_formatted() -> None:
    assert [plural(count, "value") for count in (0, 1, 1200)] == ["0 values", "1 value", "1,200 values"]
    assert [percent_with_error(0.9912, error) for error in (0.0008, None)] == ["99.12 ± 0.08 %", "99.12 %"]


def test_text_report_of_drift_says_if_only_weights_are_compared() -> None:
    found = report(Recipe())
    assert "weights only" not in drift_text(found)
    assert "weights only" in drift_text(dataclasses.replace(found, weights_only=True))


def test_text_report_of_drift_says_if_lost_values_were_not_counted() -> None:
    found = report(Recipe())
    assert "lost " not in drift_text(found)
    text = drift_text(dataclasses.replace(found, lost=None))
    assert "lost       not counted: the values that the casts make infinite or zero" in text


def test_text_report_of_drift_says_if_modules_were_compared_on_some_sequences_only() -> None:
    modules = (ModuleDrift("model.norm", 30.0, 0.5, 0),)
    for count, told in ((2, True), (6, False)):
        text = drift_text(report(Recipe(), modules=modules, modules_sequences=count))
        assert ("worst modules by SQNR (modules: 2 of 6 sequences; --modules exact compares all)" in text) == told
        assert "30.00 dB  max" in text


def test_search_report_prints_long_rules_in_full() -> None:
    rules = (
        "*=bfloat16",
        f"model.layers.{{{','.join(map(str, range(0, 400, 3)))}}}.mlp.down_proj.weight=float8_e4m3fn",
    )
    found = SearchReport("a model", "nats per token", rules, 1000, 400, 1e-3, ())
    assert [f"  {rule}" for rule in rules] == [line for line in search_text(found).splitlines() if "=" in line]
