"""Bars in cells: as long as what they show, in all widths."""

from __future__ import annotations

import itertools

import pytest

from dtype_tui.rendering.cells import meter, stacked
from dtype_tui.rendering.palette import TRACK, colour


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.0, "▁▁▁▁"), (1e-9, "▖▁▁▁"), (0.5, "▄▄▁▁"), (0.6, "▄▄▖▁"), (1.0, "▄▄▄▄"), (7.0, "▄▄▄▄")]
)
def test_meter_fills_by_half_cells(share: float, drawn: str) -> None:
    pieces = meter(share, 4, "red")
    assert "".join(text for text, _ in pieces) == drawn
    assert [style for _, style in pieces] == ["red", TRACK]


@pytest.mark.parametrize("width", range(1, 12))
def test_stacked_bar_has_the_requested_width(width: int) -> None:
    dtypes = ("bfloat16", "float8_e4m3fn", "float32")
    for parts in itertools.product(range(1, 40, 6), repeat=3):
        shares = [(dtype, part / sum(parts)) for dtype, part in zip(dtypes, sorted(parts, reverse=True), strict=True)]
        for filled in (0.0, 0.3, 1.0):
            pieces = stacked(shares, width, filled)
            assert sum(len(text) for text, _ in pieces) == width
            assert all(text for text, _ in pieces[:-1])
            if width >= 3 and filled == 1.0:
                assert [style for _, style in pieces] == [*map(colour, dtypes), TRACK]


def test_sections_of_a_stacked_bar_are_proportional() -> None:
    pieces = stacked([("bfloat16", 0.5), ("nvfp4", 0.3), ("float32", 0.2)], 10)
    assert [text for text, _ in pieces] == ["▄▄▄▄▖", "▄▄▖", "▄▄", ""]
    assert [text for text, _ in stacked([("bfloat16", 1.0)], 10, 0.4)] == ["▄▄▄▄", "▁▁▁▁▁▁"]
    assert stacked([], 4) == [("▁▁▁▁", TRACK)]
