"""Every screen as a picture, at 80 x 24 and the main ones at other sizes. After a change that is meant: `--snapshot-update`,
and look at the pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.scenes import SCENES, bring_up, make_app
from tests.helpers.screen_text import screen
from textual.pilot import Pilot

from dtype_tui.app import DtypeApp
from dtype_tui.config.config import Config

pytestmark = pytest.mark.slow

Compare = Callable[..., bool]


@pytest.fixture
def snapped(snap_compare: Any) -> Callable[..., bool]:
    def compare(name: str, app: DtypeApp, size: tuple[int, int]) -> bool:
        async def before(pilot: Pilot[None]) -> None:
            await bring_up(name, app, pilot)
            if len(app.screen_stack) > 1:
                assert "Esc" in screen(app), "the way out is on the screen"

        found: bool = snap_compare(app, terminal_size=size, run_before=before)
        return found

    return compare


@pytest.mark.parametrize("name", SCENES)
def test_every_screen_at_80_by_24(name: str, snapped: Compare) -> None:
    assert snapped(name, make_app(), (80, 24))


@pytest.mark.parametrize("name", ["mix", "measuring", "cast-prompt", "heat", "optimise", "help"])
def test_the_main_screens_at_120_by_36(name: str, snapped: Compare) -> None:
    assert snapped(name, make_app(), (120, 36))


def test_a_wide_terminal(snapped: Compare) -> None:
    assert snapped("mix", make_app(), (200, 50))


@pytest.mark.parametrize(
    "config",
    [Config("textual-light"), Config("high-contrast"), Config(ascii="always")],
    ids=["light", "high-contrast", "ascii"],
)
def test_other_themes_and_ascii(config: Config, snapped: Compare) -> None:
    assert snapped("mix", make_app(config=config), (120, 36))
