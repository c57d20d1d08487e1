"""The presets, over the main screen: what each would do to this model, and Enter puts one in force."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Recipe
from dtype_engine.recipe.outcomes import Outcome, outcomes
from dtype_engine.recipe.presets import PRESETS
from dtype_tui.screens.modal import ModalScreen


class PresetsScreen(ModalScreen[Recipe | None]):
    """Up and down choose; the result is the recipe of the preset, or None when left."""

    DEFAULT_CSS = """
    PresetsScreen { align: center middle; }
    PresetsScreen > VerticalScroll { width: 94%; max-width: 100; height: auto; max-height: 90%; border: round $accent;
        padding: 0 1; background: $surface; }
    PresetsScreen Static { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k,shift+tab", "move(-1)", "Preset above"),
        Binding("down,j,tab", "move(1)", "Preset below"),
        Binding("enter", "apply", "Put it in force, in place of all rules; u takes it back"),
        Binding("escape,q,p", "leave", "Leave everything as it was"),
    ]

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._tree = tree
        self._found: list[Outcome] = []
        self._at = 0

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False) as box:
            box.border_title = "Presets"
            box.border_subtitle = "↑↓ choose  Enter puts in force  Esc leaves"
            yield Static(markup=False)

    def on_mount(self) -> None:
        self._draw()
        self.run_worker(self._work_out, thread=True, exit_on_error=False)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def _work_out(self) -> None:
        for outcome in outcomes(self._tree):
            if not self.is_attached:
                return
            self.app.call_from_thread(self._add, outcome)

    def _add(self, outcome: Outcome) -> None:
        self._found.append(outcome)
        if self.is_attached:
            self._draw()

    def _draw(self) -> None:
        width = max(40, self.query_one(Static).size.width)
        text = Text()
        for place, name in enumerate(PRESETS):
            outcome = self._found[place] if place < len(self._found) else None
            here = place == self._at
            text.append("› " if here else "  ", style="bold")
            text.append(f"{name:<16}", style="bold" if here else "")
            text.append(f"{_effect(outcome)}\n", style="" if outcome and outcome.recipe else "dim")
            if here:
                for line in textwrap.wrap(PRESETS[name].sentence, width - 4):
                    text.append(f"    {line}\n", style="dim")
                _append_rules(text, outcome, width - 6)
        text.append("\nA preset takes the place of all rules in force.", style="dim")
        self.query_one(Static).update(text)

    def action_move(self, step: int) -> None:
        self._at = (self._at + step) % len(PRESETS)
        self._draw()

    def action_apply(self) -> None:
        if self._at >= len(self._found):
            return  # not worked out yet
        outcome = self._found[self._at]
        if outcome.recipe is None:
            self.notify(printable(outcome.reason, 500), severity="warning", markup=False)
        else:
            self.dismiss(outcome.recipe)

    def action_leave(self) -> None:
        self.dismiss(None)


def _effect(outcome: Outcome | None) -> str:
    if outcome is None:
        return "…"
    if outcome.recipe is None:
        return "needs the module classes, which are not known" if outcome.needs_classes else "nothing to do here"
    stored, planned = outcome.stored_bytes, outcome.planned_bytes
    change = f"{100 * (planned / stored - 1):+.1f} %" if stored else ""
    return f"{outcome.tensors:>7,} tensors  {human_bytes(stored):>10} → {human_bytes(planned):>10}  {change:>8}"


def _append_rules(text: Text, outcome: Outcome | None, width: int) -> None:
    if outcome is None:
        return
    if outcome.recipe is None:
        for line in textwrap.wrap(printable(outcome.reason, 500), width):
            text.append(f"    {line}\n")
        return
    shown = outcome.recipe.rules[:8]
    for rule in shown:
        text.append(f"    {printable(rule.pattern, width - 8)} → {dtypes.badge(rule.dtype)}\n")
    if len(outcome.recipe.rules) > len(shown):
        text.append(f"    and {len(outcome.recipe.rules) - len(shown)} more rules\n", style="dim")
