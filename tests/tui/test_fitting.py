"""Every screen at 80 x 24: nothing reaches beyond it, and no line is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rich.cells import cell_len
from rich.text import Text
from tests.helpers.observations import many_causes, many_inputs
from tests.helpers.recording_engine import make_app
from tests.helpers.scenes import SCENES, Scene, after, mixed, ready, scanned, with_event
from tests.helpers.screen_text import lines
from textual.containers import ScrollableContainer, VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from dtype_tui.app import DtypeApp

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


def overflowing(app: DtypeApp) -> Iterator[str]:
    """What does not fit: widgets that reach beyond the screen or their box, lines and titles that are cut."""
    for widget in app.screen.walk_children(Widget):
        if not widget.display or not widget.region:
            continue
        name = f"{type(widget).__name__} #{widget.id}"
        scrolls = any(isinstance(above, ScrollableContainer) for above in widget.ancestors)
        if not scrolls and not app.screen.region.contains_region(widget.region):
            yield f"{name} reaches beyond the screen: {widget.region}"
        if isinstance(widget, VerticalScroll) and widget.max_scroll_x and not app.screen.has_class("map"):
            yield f"{name} is {widget.max_scroll_x} cells too wide"
        for words in (widget.border_title, widget.border_subtitle):
            if words and cell_len(str(words)) > widget.region.width - 4:
                yield f"{name}: {words!r} is cut"
        words = widget.content if isinstance(widget, Static) and widget.region.height == 1 else None
        if widget.id == "command-hint":
            continue  # completions, as many as there is room for
        if isinstance(words, Text) and words.cell_len > widget.region.width:
            yield f"{name}: {words.plain!r} is cut"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCENES, *MORE_SCENES])
async def test_every_screen_fits_80_x_24(name: str) -> None:
    app = make_app()
    async with app.run_test(size=SMALL) as pilot:
        await (SCENES | MORE_SCENES)[name](app, pilot)
        await pilot.pause()
        assert list(overflowing(app)) == []
        assert all(cell_len(line) <= SMALL[0] for line in lines(app))


async def test_the_smallest_terminal_has_six_lines_of_the_tree_and_the_panes_behind_tab() -> None:
    app = make_app()
    async with app.run_test(size=(60, 15)) as pilot:
        await mixed(app, pilot)
        await pilot.press("G")
        for title, words in (("Drift", "meaning"), ("Memory", "stored"), ("Recipe", "1 ")):
            await pilot.pause()
            shown = lines(app)
            tabs = next(place for place, line in enumerate(shown) if f"[{title}]" in line)
            assert shown[tabs - 6].strip(), "six lines below the heading"
            assert tabs >= 7
            assert words in shown[tabs + 1]
            assert "❯" in "".join(shown[1:tabs]), "the cursor is in sight"
            await pilot.press("tab")
