"""The window with the implicit casts of a forward pass."""

from __future__ import annotations

from rich.console import Console

from dtype_engine.results.drift import ImplicitCastStats
from dtype_tui.screens.flow import MOST_ROWS, flow_screen


def _shown(casts: int, text: str = "linear") -> str:
    rows = [ImplicitCastStats(f"layer.{number}", text, text, "bfloat16", 10, 2, False) for number in range(casts)]
    console = Console(width=90)
    with console.capture() as captured:
        console.print(flow_screen(rows, 100)._body)
    return captured.get()


def test_so_many_casts_are_shown_and_the_rest_is_counted() -> None:
    assert f"layer.{MOST_ROWS - 1} " in _shown(MOST_ROWS)
    assert "more" not in _shown(MOST_ROWS)
    text = _shown(MOST_ROWS + 1005)
    assert f"layer.{MOST_ROWS} " not in text
    assert "and 1,005 more" in text


def test_an_operation_and_dtypes_without_end_are_cut() -> None:
    assert len(_shown(2, "x" * 1_000_000)) < 5000
