"""Blocks in columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from dtype_tui.rendering.columns import GAP, in_columns

blocks = st.lists(st.lists(st.text("abc", min_size=1, max_size=20), min_size=1, max_size=9), min_size=1, max_size=7)


def laid(found: list[list[str]], width: int, narrowest: int) -> list[str]:
    return in_columns([[Text(line) for line in block] for block in found], width, narrowest).plain.split("\n")


@pytest.mark.slow
@given(blocks, st.integers(24, 120))
def test_column_layout_keeps_all_text_within_the_width(found: list[list[str]], width: int) -> None:
    page = laid(found, width, 22)
    assert all(len(line) <= width for line in page)
    words = sorted(word for line in page for word in line.split())
    assert words == sorted(line for block in found for line in block)


def test_two_blocks_share_a_row_if_there_is_room() -> None:
    found = [["one", "a"], ["two", "b"]]
    assert laid(found, 10, 4) == ["one   two", "a     b"]
    assert laid(found, 8, 4) == ["one", "a", "", "two", "b"]
    assert laid(found, 2 * 4 + GAP, 4)[0].split() == ["one", "two"]
