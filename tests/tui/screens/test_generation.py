"""The window with generated texts: what an engine elsewhere may send for one."""

from __future__ import annotations

import pytest
from tests.helpers.recording_engine import launched
from tests.helpers.screen_text import screen, until
from textual.containers import VerticalScroll

from dtype_engine.results.runs import Generation, Written
from dtype_tui.screens.generation import MOST_TEXTS, GenerationScreen


def _text(pieces: int, piece: str = "ab ") -> Generation:
    one, other = ((5,) * pieces, (5,) * (pieces - 1) + (6,))
    return Generation("the prompt", Written(one, (piece,) * pieces, 0.5), Written(other, (piece,) * pieces, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "end"),
    [
        ((_text(4),) * 3000, f"and {3000 - MOST_TEXTS:,} more"),
        ((_text(100_000),), "the first 99,999 tokens are the same"),
        ((_text(2, "x\n" * 3_000_000),), "the first token is the same"),
    ],
    ids=["texts", "tokens", "lines"],
)
async def test_overlong_generated_texts_are_cut(texts: tuple[Generation, ...], end: str) -> None:
    async with launched() as (app, pilot):
        await app.push_screen(GenerationScreen(None, texts, lambda wanted: True, lambda: None))
        await pilot.pause()
        rows = app.screen.query_one(VerticalScroll)
        assert rows.virtual_size.height < 5000
        rows.scroll_end(animate=False)
        await until(pilot, lambda: end in screen(app))


async def test_slow_generation_is_shown_in_seconds_per_token() -> None:
    async with launched() as (app, pilot):
        slow, fast = Written((5,), ("ab ",), 52.77), Written((5,) * 30, ("ab ",) * 30, 1.5)
        text = Generation("the prompt", slow, fast)
        await app.push_screen(GenerationScreen(None, (text,), lambda wanted: True, lambda: None))
        await until(pilot, lambda: "1 token, 52.77 s, 52.77 s each" in screen(app))
        assert "30 tokens, 1.50 s, 20/s" in screen(app)


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_both_lines_of_the_generation_window_have_labels(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await app.push_screen(GenerationScreen(None, (), lambda wanted: True, lambda: None))
        await until(pilot, lambda: "prompt  empty: the model's inputs" in screen(app))
        assert "tokens  48" in screen(app)
