"""The window with generated texts: what an engine elsewhere may send for one."""

from __future__ import annotations

import pytest
from tests.helpers.recording_engine import engine, launched, model_ready, say
from tests.helpers.scenes import token_choices
from tests.helpers.screen_text import screen, until
from textual.containers import VerticalScroll

from dtype_engine.results.runs import Generation, Written
from dtype_engine.results.token_choices import TextChoices, TokenReport
from dtype_engine.service import events
from dtype_engine.service.jobs import TOKENS, GenerateText
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
        await app.push_screen(GenerationScreen(None, True, texts, lambda *asked: True, lambda: None))
        await pilot.pause()
        rows = app.screen.query_one(VerticalScroll)
        assert rows.virtual_size.height < 5000
        rows.scroll_end(animate=False)
        await until(pilot, lambda: end in screen(app))


async def test_slow_generation_is_shown_in_seconds_per_token() -> None:
    async with launched() as (app, pilot):
        slow, fast = Written((5,), ("ab ",), 52.77), Written((5,) * 30, ("ab ",) * 30, 1.5)
        text = Generation("the prompt", slow, fast)
        await app.push_screen(GenerationScreen(None, True, (text,), lambda *asked: True, lambda: None))
        await until(pilot, lambda: "1 token, 52.77 s, 52.77 s each" in screen(app))
        assert "30 tokens, 1.50 s, 20/s" in screen(app)


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_both_lines_of_the_generation_window_have_labels(size: tuple[int, int]) -> None:
    async with launched(size=size) as (app, pilot):
        await app.push_screen(GenerationScreen(None, False, None, lambda *asked: True, lambda: None))
        await until(pilot, lambda: "prompt  empty: the model's inputs" in screen(app))
        assert "tokens  48" in screen(app)


async def test_tokens_that_differ_are_beside_those_of_the_reference() -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        await say(app, pilot, model_ready(app), events.Idle())
        await pilot.press("g", *"class", "enter")
        assert engine(app).commands[-1] == "tokens 48 class"
        wanted = TOKENS.ask(GenerateText(48, "class"))
        growing = Generation("class", Written((5,), (" Wo",), 0.1), Written((), (), 0.0), finished=False)
        await say(app, pilot, events.JobGrown(app.controller.experiment.recipe, wanted, growing))
        await until(pilot, lambda: "generating: reference" in screen(app) and "class Wo" in screen(app))
        assert "candidate" not in screen(app).partition("class Wo")[0], "the candidate writes nothing"
        await pilot.press("f2")
        await until(pilot, lambda: "This runs until it is done" in screen(app))
        await say(app, pilot, token_choices(app), events.Idle())
        await until(pilot, lambda: "⟦ run |  stop⟧" in screen(app))
        text = screen(app)
        assert "(        return |         pass)" in text
        assert "7 identical (70.0 %), 1 tie (10.0 %), 2 different (20.0 %)" in text
        assert "up to 0.016 nats" in text
        app.screen.query_one(VerticalScroll).scroll_end(animate=False)
        await until(pilot, lambda: "1 tie, 2 different; 10 tokens, 500.0 ms, 20/s" in screen(app))
        asked = len(engine(app).commands)
        await pilot.press("escape", "g")
        await until(pilot, lambda: "⟦ run |  stop⟧" in screen(app))
        assert len(engine(app).commands) == asked, "what was found is kept while the recipe is the same"
        await pilot.press("f2")
        assert engine(app).commands[-1] == "generate 48 class"
        await say(app, pilot, events.Refused("generate", "texts of 48 tokens are too long"))
        await until(pilot, lambda: "texts of 48 tokens are too long" in screen(app))
        await pilot.press("f2")
        assert engine(app).commands[-1] == "tokens 48 class"
        await pilot.press("escape")
        assert engine(app).commands[-1] == "cancel tokens"


@pytest.mark.slow
async def test_overlong_texts_of_the_reference_are_cut() -> None:
    many, long = 3000, 100_000
    text = TextChoices(
        "p", Written((5,) * 4, ("ab ",) * 4, 0.5), (5,) * 4, ("ab ",) * 4, (0.0,) * 4, ("identical",) * 4
    )
    all_differ = TextChoices(
        "p",
        Written((5,) * long, ("ab\n",) * long, 0.5),
        (6,) * long,
        ("c",) * long,
        (1.0,) * long,
        ("different",) * long,
    )
    for texts, end in (((text,) * many, f"and {many - MOST_TEXTS:,} more"), ((all_differ,), "100,000 different")):
        async with launched() as (app, pilot):
            report = TokenReport("m", "cpu", (), "prompts", texts, None)
            await app.push_screen(GenerationScreen(None, False, report, lambda *asked: True, lambda: None))
            await pilot.pause()
            rows = app.screen.query_one(VerticalScroll)
            assert rows.virtual_size.height < 5000
            rows.scroll_end(animate=False)
            await until(pilot, lambda end=end: end in screen(app))  # type: ignore[misc]
