"""Screens at 80 x 24: nothing reaches beyond it, and no line is cut. `test_snapshots.py` looks at every scene for it."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from tests.helpers.observations import many_causes, many_inputs
from tests.helpers.recording_engine import make_app
from tests.helpers.scenes import SCENES, Scene, after, mixed, ready, scanned, with_event
from tests.helpers.screen_text import lines, overflowing

SMALL = (80, 24)
MORE_SCENES: dict[str, Scene] = {
    "map": with_event(ready, scanned, "s", "m"),
    "all dtypes": with_event(ready, scanned, "s", "a"),
    "compare": after(SCENES["history"], "c", "j", "c"),
    "limits": with_event(ready, scanned, "o", "slash"),
    "many inputs": with_event(ready, many_inputs, "i"),
    "many causes": with_event(after(mixed, "d"), many_causes),
    "messages": after(ready, "u", "M"),
    "palette": after(ready, "ctrl+p"),
    "paths": after(ready, "colon", *"export "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_SCENES)
async def test_further_screens_fit_80_x_24(name: str) -> None:
    app = make_app()
    async with app.run_test(size=SMALL) as pilot:
        await MORE_SCENES[name](app, pilot)
        await pilot.pause()
        assert list(overflowing(app)) == []
        assert all(cell_len(line) <= SMALL[0] for line in lines(app))


@pytest.mark.slow
async def test_smallest_terminal_shows_six_tree_lines_and_panes_as_tabs() -> None:
    app = make_app()
    async with app.run_test(size=(60, 15)) as pilot:
        await mixed(app, pilot)
        await pilot.press("G")
        for title, words in (("Drift", "KL"), ("Memory", "█"), ("Recipe", "1 ")):
            await pilot.pause()
            shown = lines(app)
            tabs = next(place for place, line in enumerate(shown) if f"[{title}]" in line)
            assert shown[tabs - 6].strip(), "six lines below the heading"
            assert tabs >= 7
            assert words in shown[tabs + 1]
            assert "▌" in "".join(shown[1:tabs]), "the cursor is in sight"
            await pilot.press("tab")
