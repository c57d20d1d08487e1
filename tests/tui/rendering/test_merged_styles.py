"""Blanks that take the style of the text next to them: what is seen stays as it was, in fewer pieces."""

from __future__ import annotations

import pytest
from rich.segment import Segment
from rich.style import Style
from textual.color import Color

from dtype_tui.rendering.merged_styles import MergedStyles

RED, BLUE = Style(color="red", bgcolor="black"), Style(color="blue", bgcolor="black")
ON_GREEN = Style(color="red", bgcolor="green")


def merged(*pieces: tuple[str, Style]) -> list[tuple[str, Style | None]]:
    segments = MergedStyles().apply([Segment(*piece) for piece in pieces], Color.parse("black"))
    return [(segment.text, segment.style) for segment in segments]


def test_blanks_join_the_text_before_or_after_them() -> None:
    assert merged(("  ", BLUE), ("name", RED), ("   ", BLUE), ("12", BLUE)) == [("  name   ", RED), ("12", BLUE)]
    assert merged(("a", RED), ("b", BLUE)) == [("a", RED), ("b", BLUE)]
    assert merged((" ", RED), (" ", BLUE), ("b", RED)) == [("  b", RED)]


@pytest.mark.parametrize(
    "other",
    [
        ON_GREEN, BLUE + Style(underline=True), BLUE + Style(reverse=True), BLUE + Style(strike=True),
        BLUE + Style(overline=True), BLUE + Style(link="file:x"), BLUE + Style(meta={"key_action": "undo"}),
    ],
)  # fmt: skip
def test_blanks_that_look_or_act_otherwise_stay(other: Style) -> None:
    assert len(merged(("a", RED), ("  ", other))) == len(merged(("  ", other), ("a", RED))) == 2
