"""The labels over the main screen: each leads to its row or pane, at every size and in a read-only session."""

from __future__ import annotations

import pytest
from tests.helpers.recording_engine import demo_tree, launched
from tests.helpers.scenes import mixed, ready
from tests.helpers.screen_text import lines
from textual.widgets import Static

from dtype_tui.app import DtypeApp
from dtype_tui.screens.jump import JumpScreen, labels
from dtype_tui.widgets.module_tree import ModuleTree


@pytest.mark.parametrize("count", [0, 1, 5, 26, 27, 40, 200, 676])
def test_jump_labels_are_not_prefixes_of_one_another(count: int) -> None:
    made = labels(count)
    assert len(set(made)) == len(made) == count
    assert {len(label) for label in made} <= {1, 2}
    assert not [one for one in made for other in made if one != other and other.startswith(one)]
    assert count > 26 or all(len(label) == 1 for label in made)


def label_of(app: DtypeApp, words: str) -> str:
    """The label in front of a row of the tree."""
    (line,) = (line for line in lines(app) if line[2:].split()[:2] == ["▸", words] or line[2:].split()[:1] == [words])
    return line[:2].strip()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
@pytest.mark.parametrize("read_only", [False, True])
async def test_jump_label_leads_to_its_row_or_pane(size: tuple[int, int], read_only: bool) -> None:
    async with launched(read_only=read_only, size=size) as (app, pilot):
        await mixed(app, pilot)
        await pilot.press("home")
        tree = app.query_one(ModuleTree)
        await pilot.press("semicolon")
        await pilot.pause()
        assert isinstance(app.screen, JumpScreen)
        shown = [str(static.content) for static in app.screen.query(".label").results(Static)]
        panes = len(app.main.side.panes) + bool(app.main.depth.region)
        assert shown == labels(panes + len(list(tree.rows_on_screen())))
        await pilot.press(*label_of(app, "embed_tokens"))
        await pilot.pause()
        assert (tree.current.name, app.focused) == ("model.embed_tokens", tree)
        for number, pane in enumerate(app.main.side.panes):
            await pilot.press("semicolon", *labels(panes)[number])
            await pilot.pause()
            assert app.focused is pane
            assert pane.region, "it is shown, also behind a tab"
        await pilot.press("semicolon", "escape")
        assert app.screen is app.main
        assert app.focused is app.main.side.panes[-1]
        assert tree.current.name == "model.embed_tokens"


@pytest.mark.slow
async def test_first_letter_hides_the_other_jump_labels() -> None:
    async with launched(demo_tree(), size=(110, 40)) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("F", "E", "semicolon")
        await pilot.pause()
        every = [str(static.content) for static in app.screen.query(".label").results(Static)]
        assert len(every) > 26
        first, last = every[-1]
        await pilot.press("0", first)
        await pilot.pause()
        shown = [str(static.content) for static in app.screen.query(".label").results(Static) if static.display]
        assert shown == [label for label in every if label.startswith(first)]
        row = list(app.query_one(ModuleTree).rows_on_screen())[-1][0]
        await pilot.press(last)
        await pilot.pause()
        assert app.query_one(ModuleTree).current == row
        await pilot.press("semicolon")
        await pilot.resize_terminal(100, 30)
        await pilot.pause()
        assert app.screen is app.main, "the places have moved"
