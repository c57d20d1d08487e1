"""The tree's columns of drift: a widget of their own that acts as a part of the tree."""

from __future__ import annotations

from tests.helpers.recording_engine import make_app, running
from tests.helpers.scenes import mixed
from tests.helpers.screen_text import lines
from textual.events import MouseScrollDown

from dtype_tui.widgets.module_tree import ModuleTree
from dtype_tui.widgets.tree_figures import TreeFigures


async def test_a_click_and_the_wheel_act_on_the_tree() -> None:
    app = make_app()
    async with running(app, (110, 16)) as pilot:
        await mixed(app, pilot)
        tree = app.query_one(ModuleTree)
        await pilot.press("home", "tab")
        assert app.focused is not tree
        top = tree.scroll_offset.y
        await pilot.click(TreeFigures, offset=(3, 2))
        assert (tree.cursor, app.focused) == (top + 1, tree)
        figures = app.query_one(TreeFigures)
        figures.post_message(MouseScrollDown(figures, 3, 2, 0, 1, 0, False, False, False))
        await pilot.pause()
        assert tree.scroll_offset.y > top


async def test_figures_stay_beside_their_names_through_folds_columns_scrolling_and_resizing() -> None:
    app = make_app()
    async with running(app) as pilot:
        await mixed(app, pilot)
        tree = app.query_one(ModuleTree)
        for act in ("hide", "show", "pagedown", "w", "home", (80, 24), (200, 50), "hide", "show", (120, 36)):
            if act in ("hide", "show"):
                tree.hide(frozenset({"drift"} if act == "hide" else ()))
            elif isinstance(act, tuple):
                await pilot.resize_terminal(*act)
            else:
                await pilot.press(act)
            await pilot.pause()
            await pilot.pause()
            drawn = [line[: tree.size.width - 1].rstrip() for line in lines(app)[1 : 1 + tree.size.height]]
            assert drawn == [tree.line(y).text[: tree.size.width - 1].rstrip() for y in range(tree.size.height)], act
