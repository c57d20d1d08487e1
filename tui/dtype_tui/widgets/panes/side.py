"""The side panes Drift, Memory and Recipe, one above the other or behind tabs. They display the experiment and have no state of
their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from dtype_tui.widgets.message_line import MessageLine
from dtype_tui.widgets.panes.base import Pane
from dtype_tui.widgets.panes.drift import DriftPane
from dtype_tui.widgets.panes.memory import MemoryPane
from dtype_tui.widgets.panes.recipe import RecipePane

if TYPE_CHECKING:
    from dtype_tui.state.experiment import Experiment


class SidePanes(Vertical):
    """Holds the panes Drift, Memory and Recipe: one above the other if they fit, otherwise one at a time below a line of tabs."""

    DEFAULT_CSS = """
    SidePanes { width: 1fr; min-width: 38; layers: base over; }
    SidePanes > MessageLine { split: none; layer: over; dock: bottom; height: 2; max-height: 100%; }
    SidePanes > #tabs { display: none; height: 1; }
    SidePanes > DriftPane { max-height: 50%; }
    SidePanes > MemoryPane { max-height: 34%; }
    SidePanes > RecipePane { height: 1fr; min-height: 4; }
    SidePanes.narrow { width: 100%; height: 1fr; max-height: 11; min-width: 0; }
    SidePanes.narrow > #tabs { display: block; }
    SidePanes.narrow > Pane { display: none; height: 1fr; max-height: 100%; border: none; }
    SidePanes.narrow > Pane.active { display: block; }
    """

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(id="side")
        self.panes: list[Pane] = [
            DriftPane(experiment, "Drift", "drift"),
            MemoryPane(experiment, "Memory", "memory"),
            RecipePane(experiment, "Recipe", "recipe"),
        ]
        self._active = 0

    def compose(self) -> ComposeResult:
        yield Static(id="tabs", markup=False)
        yield from self.panes
        yield MessageLine(in_place=True)

    def on_mount(self) -> None:
        self._mark()

    def next_pane(self) -> None:
        """Show the next pane if the terminal is too narrow to show all of them."""
        self._active = (self._active + 1) % len(self.panes)
        self._mark()

    def _mark(self) -> None:
        tabs = Text(" ")
        for index, pane in enumerate(self.panes):
            pane.set_class(index == self._active, "active")
            title = str(pane.border_title)
            tabs.append(
                f"[{title}]" if index == self._active else f" {title} ",
                style="bold" if index == self._active else "dim",
            )
            tabs.append(" ")
        tabs.append("  tab: next", style="dim")
        self.query_one("#tabs", Static).update(tabs)

    def show(self, activity: str, node: str) -> None:
        for pane in self.panes:
            pane.show(activity, node)
