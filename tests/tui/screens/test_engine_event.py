"""The engine's events as messages."""

from __future__ import annotations

from tests.helpers.recording_engine import engine, launched, say
from tests.helpers.screen_text import screen, until

from dtype_engine.recipe import Recipe
from dtype_engine.service import events


async def test_progress_with_an_invalid_total_has_no_impossible_percentage() -> None:
    """An engine on another machine may send any numbers."""
    async with launched() as (app, pilot):
        for done, total in ((1, 0), (5, 2), (-3, 2)):
            await say(
                app,
                pilot,
                events.CastingProgress(Recipe(), done, total),
                events.WorkingProgress(Recipe(), "it", done, total),
            )
            share = app.controller.activity.share
            assert share is None or 0 <= share <= 1
        assert "it" in screen(app)


async def test_keys_and_drawing_continue_during_a_flood_of_events() -> None:
    async with launched() as (app, pilot):
        app.main.draw_every_s = 0.1
        drawn = 0
        show_all = app.main.show_all

        def counted() -> None:
            nonlocal drawn
            drawn += 1
            show_all()

        app.main.show_all = counted  # type: ignore[method-assign]
        for done in range(1000):
            engine(app).emit(events.MeasuringProgress(Recipe(), "candidate", done, 1000))
            engine(app).emit(events.ModulesMeasured(Recipe(), ()))
        await pilot.press("j")
        assert app.main.tree_view.cursor == 1
        await until(pilot, lambda: "measuring: candidate 100 %" in screen(app).replace("  ", " "))
        assert drawn < 40, "not once for each event"
