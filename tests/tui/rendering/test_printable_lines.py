from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from tests.helpers.random_events import HOSTILE
from tests.helpers.recording_engine import make_app, running
from tests.helpers.screen_text import lines
from textual.color import Color
from textual.widgets import Static

from dtype_engine.core.text import printable
from dtype_tui.rendering.printable_lines import PrintableLines


@pytest.mark.parametrize("text", HOSTILE)
def test_unprintable_characters_are_replaced_and_widths_kept(text: str) -> None:
    style = Style(bold=True)
    segments = [Segment("left "), Segment(f"a{text}b", style), Segment(" right")]
    drawn = PrintableLines().apply(segments, Color(0, 0, 0))
    for before, after in zip(segments, drawn, strict=True):
        assert (cell_len(after.text), after.style) == (cell_len(before.text), before.style)
        assert printable(after.text, 1000) == after.text


def test_line_of_printable_characters_is_drawn_unchanged() -> None:
    segments = [Segment("漢字 e\u0301 👩 │ ▾ 1.0")]
    assert PrintableLines().apply(segments, Color(0, 0, 0)) is segments


async def test_every_widget_draws_printable_text() -> None:
    app = make_app()
    async with running(app) as pilot:
        app.screen.mount(Static("\x1b]0;owned\x07\u202eabc\u200b", markup=False))
        await pilot.pause()
        assert any("abc" in line for line in lines(app))
        assert all(printable(line, len(line)) == line for line in lines(app))
