"""Where the prompts are: over the last lines of the screen, so that nothing else moves, and never over what is needed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from rich.text import Text
from tests.helpers.recording_engine import make_app, running
from tests.helpers.scenes import opened, ready
from tests.helpers.screen_text import lines, screen
from textual.screen import Screen

from dtype_tui.app import DtypeApp
from dtype_tui.widgets.bottom_prompt import BottomPrompt

SIZES = [(60, 15), (80, 24), (100, 30), (120, 36), (200, 50)]
PROMPTS = pytest.mark.parametrize("key", ["slash", "c", "colon"])


def heights(app: DtypeApp) -> list[int]:
    """Return the heights of the panes and plots, in lines."""
    return [pane.size.height for pane in (*app.main.side.panes, app.main.depth, app.main.trade_off)]


def prompt_of(app: DtypeApp) -> BottomPrompt:
    return next(prompt for prompt in app.main.query(BottomPrompt) if prompt.is_open)


@PROMPTS
@pytest.mark.parametrize("size", SIZES)
async def test_tree_and_panes_do_not_move_when_a_prompt_opens(key: str, size: tuple[int, int]) -> None:
    async with opened(size=size) as (app, pilot):
        before, tree = heights(app), app.main.tree_view.region
        await pilot.press(key)
        await pilot.pause()
        assert prompt_of(app).region.bottom == size[1]
        assert heights(app) == before
        if prompt_of(app).lines == 2:
            assert app.main.tree_view.region == tree
        await pilot.press("escape")
        await pilot.pause()
        assert heights(app) == before
        assert app.main.tree_view.region == tree


@pytest.mark.slow
async def test_opening_a_prompt_lays_out_the_screen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layouts of the screen took longer than all the rest of the key."""
    app, layouts = make_app(), []
    lay_out = Screen._refresh_layout

    def counted(*given: Any, **named: Any) -> None:
        layouts.append(named)
        lay_out(*given, **named)

    monkeypatch.setattr(Screen, "_refresh_layout", counted)
    async with running(app, (120, 36)) as pilot:
        await ready(app, pilot)
        await pilot.pause()
        seen: set[str] = set()
        for key in ("slash", "colon", "slash", "colon"):
            layouts.clear()
            await pilot.press(key)
            await pilot.pause(0.1)
            assert len(layouts) <= (1 if key in seen else 2), "the first time, its own parts get their sizes"
            seen.add(key)
            await pilot.press("escape")
            await pilot.pause(0.1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("begins_tour", [False, True])
async def test_cursor_and_message_are_above_the_prompt(size: tuple[int, int], begins_tour: bool) -> None:
    async with opened(size=size, begins_tour=begins_tour) as (app, pilot):
        await pilot.press("E", "end")
        await pilot.pause()
        await pilot.press("c")
        app.main.say("the first line of a message, then the rest of it " * 3 + "to its END", "information")
        await pilot.pause(0.1)
        tree, top = app.main.tree_view, prompt_of(app).region.y
        cursor = tree.region.y + 1 + tree.cursor - tree.scroll_offset.y
        assert tree.region.y < cursor < min(top, tree.region.bottom)
        assert lines(app)[cursor].startswith("▌")
        if not (begins_tour and size == (60, 15)):  # there, the panes have one line, and `M` has the message
            assert "END" in screen(app)
        if begins_tour:
            assert "Tour 1" in screen(app)


@pytest.mark.slow
async def test_hint_of_several_lines_does_not_cover_the_cursor() -> None:
    async with opened(size=(100, 30)) as (app, pilot):
        await pilot.press("E", "end", "c", "ctrl+u", *"*=int3")
        await pilot.press("enter")
        await pilot.pause()
        prompt = prompt_of(app)
        prompt.hint(Text("why it is refused " * 20))
        await pilot.pause(0.1)
        assert prompt.lines == prompt.size.height == 6
        assert app.main.tree_view.region.bottom == prompt.region.y
        await pilot.resize_terminal(120, 36)
        await pilot.pause(0.1)
        assert not app.main.tree_view.styles.margin.bottom, "the plot below the tree is covered instead"
