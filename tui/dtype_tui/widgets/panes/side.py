"""The side panes Drift, Memory and Recipe, one above the other or behind tabs. They display the experiment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.geometry import Offset
from textual.widget import AwaitMount
from textual.widgets import Static

from dtype_tui.rendering.palette import ACCENT
from dtype_tui.state.controller import Controller
from dtype_tui.widgets.message_line import MessageLine

if TYPE_CHECKING:
    from dtype_tui.widgets.panes.base import Pane
    from dtype_tui.widgets.panes.recipe import RecipePane

_MOST_LINES, _MOST_TALL_LINES = (15, 8), (20, 14)
"""Maximum lines of (the Drift pane, the Memory pane). `_MOST_TALL_LINES` is for panes of at least `_TALL` lines in all."""
_TALL = 44
"""Minimum lines of all panes together for twice as many of the worst modules, and for the bytes by kind of layer."""


class SidePanes(Vertical):
    """Holds the panes one above the other if they fit, otherwise one at a time below tabs. A zoomed pane is shown alone."""

    DEFAULT_CSS = """
    SidePanes { width: 1fr; min-width: 38; layers: base over; }
    SidePanes > MessageLine { split: none; layer: over; dock: bottom; height: 2; max-height: 100%; }
    SidePanes > #tabs { display: none; height: 1; }
    SidePanes.narrow { width: 100%; height: 1fr; max-height: 8; min-width: 0; }
    SidePanes.narrow > #tabs { display: block; }
    SidePanes.narrow > Pane, SidePanes.zoomed > Pane { display: none; }
    SidePanes.narrow > Pane.active, SidePanes.zoomed > Pane.active { display: block; }
    SidePanes.zoomed { width: 100%; max-height: 100%; }
    """

    def __init__(self, controller: Controller) -> None:
        super().__init__(id="side")
        self._controller = controller
        self.panes: list[Pane] = []
        """The panes, from top to bottom. Empty until `make_panes` is called."""
        self.recipe: RecipePane
        self.active: Pane
        """The pane that is shown if there is room for only one, and that is zoomed next."""

    def compose(self) -> ComposeResult:
        yield MessageLine(in_place=True)

    def make_panes(self) -> None:
        """Import the modules of the panes and make the panes. This is done after the first paint, which shows no panes."""
        from dtype_tui.widgets.panes.drift import DriftPane
        from dtype_tui.widgets.panes.memory import MemoryPane
        from dtype_tui.widgets.panes.recipe import RecipePane

        experiment = self._controller.experiment
        self.recipe = RecipePane(self._controller, "recipe")
        self.panes = [DriftPane(experiment, "drift"), MemoryPane(experiment, "memory"), self.recipe]

    def mount_panes(self) -> AwaitMount:
        self.place()
        self._tabs = Static(id="tabs", markup=False)
        self.activate(self.panes[0])
        return self.mount(self._tabs, *self.panes, before=0)

    def on_resize(self) -> None:
        if self.panes:
            self.call_after_refresh(self.place)

    @property
    def is_narrow(self) -> bool:
        return self.has_class("narrow")

    def place(self) -> None:
        """Set the heights of the panes. They depend on the size of the terminal alone, so no pane moves when its text changes."""
        alone = self.is_narrow or self.has_class("zoomed")
        height = self.size.height
        recipe = height // 3
        most_drift, most_memory = _MOST_LINES if height < _TALL else _MOST_TALL_LINES
        memory = min(most_memory, (height - recipe) // 2)
        drift = min(most_drift, height - recipe - memory)
        for pane, lines in zip(self.panes, (drift, memory, height - drift - memory), strict=True):
            if pane.is_framed == self.is_narrow:  # the frame comes or goes, perhaps without a change of size
                pane.set_class(self.is_narrow, "tab")
                pane.call_after_refresh(pane.on_resize)
            pane.set_class(self.has_class("zoomed"), "zoomed")
            pane.styles.height = "1fr" if alone else lines

    def activate(self, pane: Pane) -> None:
        self.active = pane
        tabs = Text(" ")
        for other in self.panes:
            other.set_class(other is pane, "active")
            title = f"[{other.TITLE}]" if other is pane else f" {other.TITLE} "
            tabs.append(title, style=f"bold {ACCENT}" if other is pane else "dim")
            tabs.append(" ")
        tabs.append("  tab: next  +: alone", style="dim")
        self._tabs.update(tabs)

    def places(self) -> Iterator[tuple[Pane, Offset]]:
        """Yield each pane, with the position of the pane or of its tab, in cells from the upper left corner of the screen."""
        tabs, left = self.query_one("#tabs").region, 1
        for pane in self.panes:
            if pane.region:
                yield pane, pane.region.offset if pane.is_framed else tabs.offset + Offset(left, 0)
            elif tabs:
                yield pane, tabs.offset + Offset(left, 0)
            left += len(pane.TITLE) + 3

    def after(self, pane: Pane) -> Pane | None:
        """Return the pane below `pane`, or None if it is the last."""
        following = self.panes.index(pane) + 1
        return self.panes[following] if following < len(self.panes) else None

    def keep_free(self, lines: int) -> None:
        """Keep messages above the last lines of the panes, which a prompt covers. lines: how many lines it covers."""
        self.query_one(MessageLine).styles.margin = (0, 0, lines, 0)

    def zoom(self, zoomed: bool) -> None:
        """Show the active pane alone if `zoomed` is True, otherwise all panes."""
        self.set_class(zoomed, "zoomed")
        self.place()

    def on_pane_chosen(self, message: Pane.Chosen) -> None:
        self.activate(message.pane)
