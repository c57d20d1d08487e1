"""The plot of bytes and drift next to the plot over depth."""

from __future__ import annotations

import pytest
from tests.helpers.scenes import history, mixed, opened
from tests.helpers.screen_text import screen


@pytest.mark.parametrize("size", [(120, 36), pytest.param((200, 50), marks=pytest.mark.slow)])
async def test_trade_off_plot_has_a_point_for_each_measured_recipe(size: tuple[int, int]) -> None:
    wide = size[0] > 120
    async with opened(mixed, size) as (app, pilot):
        assert ("Needs two measured recipes." in screen(app)) == wide
        assert "across: planned MiB" not in screen(app), "one point shows no trade-off"
        await history(app, pilot)
        await pilot.press("j", "P", "escape")
        await pilot.pause()
        pane = app.main.trade_off
        drawn = "".join(pane.render_line(y).text for y in range(pane.size.height))
        assert [drawn.count(mark) for mark in "●P○"] == ([1, 1, 2] if wide else [0, 0, 0])
        assert ("across: planned MiB, up: KL, nats" in drawn) == wide
