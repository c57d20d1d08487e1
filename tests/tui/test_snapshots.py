"""Every screen as a picture, at 80 x 24 and the main ones at other sizes. After a change that is meant: `--snapshot-update`,
and look at the pictures.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len
from tests.helpers.scenes import SCENES, bring_up, make_app
from tests.helpers.screen_text import lines, overflowing, screen
from textual.pilot import Pilot

from dtype_tui.app import DtypeApp
from dtype_tui.config.config import Config
from dtype_tui.widgets.message_line import MessageLine

pytestmark = pytest.mark.slow

Compare = Callable[..., bool]
SMALL = (80, 24)
LONG = (
    "rule 3: the pattern model.layers.*.mlp.down_projection takes nothing in this model; did you mean down_proj? " * 3
)


@pytest.fixture
def snapped(snap_compare: Any) -> Compare:
    def compare(name: str, app: DtypeApp, size: tuple[int, int], look: Callable[[], object] = lambda: None) -> bool:
        async def before(pilot: Pilot[None]) -> None:
            await bring_up(name, app, pilot)
            if len(app.screen_stack) > 1:
                assert "Esc" in screen(app), "the way out is on the screen"
            look()

        found: bool = snap_compare(app, terminal_size=size, run_before=before)
        return found

    return compare


@pytest.mark.parametrize("name", SCENES)
def test_every_screen_fits_80_by_24(name: str, snapped: Compare) -> None:
    """Every screen looks as in its snapshot and fits. With ASCII, the same cells are drawn. A message covers nothing."""
    app = make_app()
    drawn: list[str] = []

    def look() -> None:
        assert list(overflowing(app)) == []
        drawn[:] = lines(app)
        assert all(cell_len(line) <= SMALL[0] for line in drawn)

    assert snapped(name, app, SMALL, look)
    asyncio.run(in_ascii_with_a_message(name, drawn))


async def in_ascii_with_a_message(name: str, drawn: list[str]) -> None:
    app = make_app(config=Config(ascii="always"))
    async with app.run_test(size=SMALL) as pilot:
        await bring_up(name, app, pilot)
        for plain, fancy in zip(lines(app), drawn, strict=True):
            assert plain.isascii()
            assert "?" not in plain or "?" in fancy, f"a character that is in no table: {fancy}"
            assert len(plain) == cell_len(fancy)
            assert plain.count("+-") >= fancy.count("±")
            assert plain.count("->") >= len(re.findall("(?<![←↑→↓])→(?![←↑→↓])", fancy))
        if name not in ("measuring", "failed", "as-stored"):
            await a_message_covers_nothing(app, pilot)


async def a_message_covers_nothing(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Assert that a message covers neither the keys nor the words of a window."""
    app.notify(LONG, severity="warning")
    await pilot.pause()
    await pilot.pause()
    line = app.screen.query_one(MessageLine)
    assert "! rule 3: the pattern" in screen(app)
    shown = [other for other in app.screen.children if other.display and other is not line and other.region]
    if len(app.screen_stack) == 1:
        assert app.main.side.region.contains_region(line.region), "only the end of the panes is covered"
        shown = [other for other in shown if other.id != "main"]
    assert not [other for other in shown if other.region.overlaps(line.region)]


@pytest.mark.parametrize("name", ["mix", "measuring", "cast-prompt", "heat", "optimise", "help"])
def test_main_screens_at_120_by_36(name: str, snapped: Compare) -> None:
    assert snapped(name, make_app(), (120, 36))


def test_wide_terminal_at_200_by_50(snapped: Compare) -> None:
    assert snapped("mix", make_app(), (200, 50))


@pytest.mark.parametrize(
    "config",
    [Config("textual-light"), Config("high-contrast"), Config(ascii="always")],
    ids=["light", "high-contrast", "ascii"],
)
def test_other_themes_and_ascii(config: Config, snapped: Compare) -> None:
    assert snapped("mix", make_app(config=config), (120, 36))
