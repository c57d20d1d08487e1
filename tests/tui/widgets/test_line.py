"""A line at the edge of the screen: what it repaints, and what a click on it does."""

from __future__ import annotations

from rich.text import Text
from tests.helpers.screen_text import until
from textual.app import App, ComposeResult
from textual.geometry import Region

from dtype_tui.widgets.line import ACTION, Line


class Recorded(Line):
    """Counts how often it asks to be painted."""

    repainted = 0

    def __init__(self) -> None:
        super().__init__("line")

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Recorded:
        self.repainted += 1
        super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)
        return self


class Lines(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.clicked = 0

    def compose(self) -> ComposeResult:
        yield Recorded()

    def action_count(self) -> None:
        self.clicked += 1


async def test_status_line_is_painted_only_when_its_text_changes() -> None:
    app = Lines()
    async with app.run_test(size=(40, 3)) as pilot:
        line = app.query_one(Recorded)
        line.show(Text("measuring 10 %  Esc stops"))
        await pilot.pause()
        line.repainted = 0
        line.show(Text("measuring 12 %  Esc stops"))
        assert line.repainted == 1
        line.show(Text("measuring 12 %  Esc stops"))
        assert line.repainted == 1
        await pilot.resize_terminal(12, 3)
        await until(pilot, lambda: line.size.width == 12)
        assert line.render_line(0).text == "measuring 12"
        line.show(Text("日本"))
        assert line.render_line(0).text == "日本" + 8 * " "


async def test_click_on_a_key_in_a_line_runs_its_action() -> None:
    app = Lines()
    async with app.run_test(size=(40, 3)) as pilot:
        key = Text("c cast")
        key.apply_meta({ACTION: "app.count"})
        app.query_one(Recorded).show(Text.assemble("  ", key))
        await pilot.pause()
        await pilot.click("#line", offset=(3, 0))
        assert app.clicked == 1
        await pilot.click("#line", offset=(20, 0))
        assert app.clicked == 1
