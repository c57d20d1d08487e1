"""The window that lists the presets with the effect of each on this model."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import change_text, human_bytes
from dtype_engine.recipe import Recipe
from dtype_engine.recipe.presets import PRESETS, PresetEffect, preset_effects
from dtype_tui.screens.choice import ChoiceScreen
from dtype_tui.state.experiment import Experiment


class PresetsScreen(ChoiceScreen[Recipe]):
    """The window in which the user chooses a preset. Its result is the preset's recipe."""

    HEADING = "Presets"
    KEYS = "↑↓ choose  Enter applies  Esc closes"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k,shift+tab", "move(-1)", "Preset above"),
        Binding("down,j,tab", "move(1)", "Preset below"),
        Binding("enter", "apply", "Replace all rules by the preset; u undoes this"),
        Binding("escape,q,p", "leave", "Close, and change nothing"),
    ]

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(len(PRESETS))
        self._experiment = experiment
        self.effects: list[PresetEffect] = []
        """The effects of the presets that have been computed, in the order of the presets."""

    def on_mount(self) -> None:
        self.run_worker(self._compute_effects, thread=True, exit_on_error=False)

    def _compute_effects(self) -> None:
        for effect in preset_effects(self._experiment.tree, self._experiment.needed_bytes):
            if not self.is_attached:
                return
            self.app.call_from_thread(self._add, effect)

    def _add(self, effect: PresetEffect) -> None:
        self.effects.append(effect)
        if self.is_attached:
            self.redraw()

    def draw(self) -> Text:
        width = max(40, self.lines.size.width)
        text = Text()
        for index, name in enumerate(PRESETS):
            effect = self.effects[index] if index < len(self.effects) else None
            chosen = index == self.index
            text.append(*self.marker(index))
            text.append(f"{name:<16}", style="bold" if chosen else "")
            words = _effect_words(effect, self._experiment.room)
            text.append(f"{words}\n", style="" if effect and effect.recipe else "dim")
            if chosen:
                for line in textwrap.wrap(PRESETS[name].sentence, width - 4):
                    text.append(f"    {line}\n", style="dim")
                _append_rules(text, effect, width - 6)
        for line in textwrap.wrap(self._footer(), width):
            text.append(f"\n{line}", style="dim")
        return text

    def _footer(self) -> str:
        """Return sentences with the stored bytes of the model, and with the bytes into which it must fit, if known."""
        experiment, room = self._experiment, human_bytes(self._experiment.room or 0)
        sentences = [f"Stored: {human_bytes(experiment.tree.stored_bytes)}."]
        if experiment.served.budget:
            sentences += [f"Weights, KV cache and activations at {experiment.context_words} must fit in {room}."]
        elif experiment.room:
            of = experiment.model.device or "the machine"
            sentences += [f"The weights must fit in the {room} of memory of {of}."]
        return " ".join([*sentences, "A preset replaces all current rules."])

    def action_apply(self) -> None:
        if self.index >= len(self.effects):
            return
        effect = self.effects[self.index]
        if effect.recipe is None:
            self.notify(printable(effect.reason, 500), severity="warning", markup=False)
        else:
            self.dismiss(effect.recipe)


def _effect_words(effect: PresetEffect | None, room: int | None) -> str:
    if effect is None:
        return "…"
    if effect.recipe is None:
        return "available once the model has loaded" if effect.needs_classes else "nothing to do here"
    change = change_text(effect.stored_bytes, effect.planned_bytes)
    fits = "" if room is None else "fits" if effect.needed_bytes <= room else "does not fit"
    return f"{effect.tensors:>7,} tensors {human_bytes(effect.planned_bytes):>10}  {change:>11}  {fits}".rstrip()


def _append_rules(text: Text, effect: PresetEffect | None, width: int) -> None:
    if effect is None:
        return
    if effect.recipe is None:
        for line in textwrap.wrap(printable(effect.reason, 500), width):
            text.append(f"    {line}\n")
        return
    shown = effect.recipe.rules[:8]
    for rule in shown:
        text.append(f"    {printable(rule.pattern, width - 8)} → {dtypes.short_name(rule.dtype)}\n")
    if len(effect.recipe.rules) > len(shown):
        text.append(f"    and {len(effect.recipe.rules) - len(shown)} more rules\n", style="dim")
