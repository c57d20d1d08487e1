"""What Enter shows of a node: the drift of the whole model is its output's."""

from __future__ import annotations

import pytest
from tests.helpers.recording_engine import make_app, running
from tests.helpers.scenes import Scene, measured_in_part, measuring, mixed
from tests.helpers.screen_text import lines, screen
from textual.containers import VerticalScroll


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        (measuring, ""),
        (measured_in_part, "SQNR 40.00 dB ± 0.43, max |Δ| 5.0000e-01, non-finite 0, over 2 of 6 sequences, 295 tokens"),
        (mixed, "SQNR 40.00 dB, max |Δ| 5.0000e-01, non-finite 0"),
    ],
)
async def test_the_whole_model_has_a_drift_once_its_output_was_compared(scene: Scene, words: str) -> None:
    app = make_app()
    async with running(app) as pilot:
        await scene(app, pilot)
        await pilot.press("less_than_sign", "enter")
        await pilot.pause()
        box = app.screen.query_one(VerticalScroll).content_region
        shown = " ".join(line[box.x : box.right] for line in lines(app)[box.y : box.bottom])
        assert "the whole model" in shown
        drift = " ".join(shown.partition(" drift ")[2].partition(" rule ")[0].split())
        assert drift == words, screen(app)
