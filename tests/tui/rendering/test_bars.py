"""Bars in cells: as long as what they show, in all widths."""

from __future__ import annotations

import itertools

import pytest
from rich.segment import Segment
from rich.style import Style
from textual.color import Color

from dtype_engine.core.units import apportioned
from dtype_tui.config.ascii import AsciiFilter
from dtype_tui.rendering.cells import meter, stacked
from dtype_tui.rendering.palette import TRACK, colour

EIGHTHS = "▏▎▍▌▋▊▉█"


def lengths(pieces: list[tuple[str, str]]) -> dict[str, int]:
    """The length of each section of a bar, in eighths of a cell."""
    found: dict[str, int] = {}
    for text, style in pieces[:-1]:
        left, _, right = style.partition(" on ")
        filled = sum(EIGHTHS.index(each) + 1 for each in text)
        found[left] = found.get(left, 0) + filled
        if right:
            found[right] = found.get(right, 0) + 8 * len(text) - filled
    return found


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
            assert set(lengths(pieces)) <= set(map(colour, dtypes))


def test_sections_of_a_stacked_bar_are_proportional_to_their_shares() -> None:
    pieces = stacked([("bfloat16", 0.5), ("nvfp4", 0.3), ("float32", 0.2)], 10)
    assert [text for text, _ in pieces] == ["█████", "███", "██", ""]
    pieces = stacked([("bfloat16", 0.55), ("nvfp4", 0.45)], 5)
    assert pieces == [("██", "cyan"), ("▊", "cyan on bright_red"), ("██", "bright_red"), ("", TRACK)], (
        "22 of 40 eighths"
    )
    assert [text for text, _ in stacked([("bfloat16", 1.0)], 10, 0.45)] == ["████▌", "▁▁▁▁▁"]
    assert stacked([], 4) == [("▁▁▁▁", TRACK)]


@pytest.mark.parametrize("width", [3, 6, 8, 12, 20, 34])
@pytest.mark.parametrize("filled", [0.26, 0.51, 1.0])
def test_every_section_is_as_long_as_its_share(width: int, filled: float) -> None:
    for first in range(51, 100):
        shares = [("int8", first / 100), ("float32", 1 - first / 100)]
        drawn = lengths(stacked(shares, width, filled))
        for dtype, share in shares:
            assert abs(drawn.get(colour(dtype), 0) - 8 * width * filled * share) <= 2.5, (width, filled, first, drawn)


def test_bar_shows_no_section_for_a_share_under_an_eighth_of_a_cell() -> None:
    pieces = stacked([("bfloat16", 0.875), ("float8_e4m3fn", 0.12), ("float32", 0.005)], 12)
    drawn = lengths(pieces)
    assert colour("float32") not in drawn
    assert sum(drawn.values()) == 96
    assert abs(drawn[colour("float8_e4m3fn")] - 0.12 * 96) <= 1
    assert lengths(stacked([("bfloat16", 0.97), ("float32", 0.03)], 12))[colour("float32")] == 3


def test_cell_of_more_than_two_sections_shows_the_two_longest() -> None:
    pieces = stacked([("bfloat16", 0.5), ("float16", 0.25), ("float32", 0.125), ("nvfp4", 0.125)], 1)
    assert [style for _, style in pieces] == ["cyan on bright_cyan", TRACK]


def test_apportioned_integers_have_the_requested_sum() -> None:
    assert apportioned([0.97, 0.03], 10) == [10, 0]
    assert apportioned([1, 1, 1], 10) == [4, 3, 3]
    assert apportioned([0.49, 0.48, 0.03], 3) == [2, 1, 0]
    assert apportioned([], 4) == []
    assert apportioned([0.0, 0.0], 4) == [0, 0]
    for whole in range(40):
        assert sum(apportioned([0.61, 0.31, 0.05, 0.03], whole)) == whole


def test_bars_in_ascii_have_whole_cells_in_proportion_to_the_shares() -> None:
    line = [Segment("▌", Style(color="blue")), Segment(" layers ", Style(bgcolor="black"))]
    shares = [("bfloat16", 0.55), ("float8_e4m3fn", 0.42), ("float32", 0.03)]
    line += [Segment(text, Style.parse(style)) for text, style in stacked(shares, 8)] + [Segment(" bf16")]
    drawn = AsciiFilter().apply(line, Color(0, 0, 0))
    assert "".join(segment.text for segment in drawn) == "> layers ######## bf16"
    sections = [segment for segment in drawn if "#" in segment.text]
    assert sections == [Segment("#####", Style(color="cyan")), Segment("###", Style(color="magenta"))]
    half = [Segment(text, Style.parse(style)) for text, style in stacked(shares[:1], 8, 0.4)]
    assert "".join(segment.text for segment in AsciiFilter().apply(half, Color(0, 0, 0))) == "###_____"


@pytest.mark.parametrize(
    ("width", "filled", "drawn"), [(36, 0.452, "14 cyan 2 magenta 20"), (12, 0.452, "5 cyan 1 magenta 6")]
)
def test_empty_part_of_a_bar_in_ascii_comes_after_the_sections(width: int, filled: float, drawn: str) -> None:
    behind = Style(bgcolor="black")
    bar = stacked([("bfloat16", 0.88), ("float8_e4m3fn", 0.115), ("float32", 0.005)], width, filled)
    line = [Segment(text, behind + Style.parse(style)) for text, style in bar] + [Segment(" 55 % less", behind)]
    words, found = drawn.split(), AsciiFilter().apply(line, Color(0, 0, 0))
    sections = [Segment("#" * int(words[at]), behind + Style(color=words[at + 1])) for at in (0, 2)]
    assert [segment for segment in found if "#" in segment.text] == sections
    assert "".join(segment.text for segment in found).startswith("#" * (width - int(words[-1])) + "_" * int(words[-1]))
