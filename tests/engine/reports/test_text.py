"""Figures in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtype_engine.core.units import human_bytes, human_count


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (999_949, "999.9 k"), (999_950, "1.0 M"), (671_026_419_200, "671.0 G"),
     (10**12, "1.0 T"), (10**15, "1000.0 T")],
)  # fmt: skip
def test_counts(count: int, shown: str) -> None:
    assert human_count(count) == shown


@given(st.integers(0, 10**15))
def test_a_count_is_never_read_as_bytes(count: int) -> None:
    number, _, unit = human_count(count).partition(" ")
    assert unit in ("", "k", "M", "G", "T")
    assert float(number) * 1000 ** " kMGT".index(unit or " ") == pytest.approx(count, rel=0.051, abs=0.5)
    assert human_bytes(count).endswith("B")
