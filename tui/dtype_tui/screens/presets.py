"""The window that lists the presets with the effect of each on this model."""

from __future__ import annotations

import math
import textwrap
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType

from dtype_engine.core import dtypes
from dtype_engine.core.roundings import ROUNDINGS
from dtype_engine.core.text import printable
from dtype_engine.core.units import change_text, decibels, human_bytes, plural, scientific
from dtype_engine.recipe import Recipe, make_plan
from dtype_engine.recipe.presets import PRESETS, Preset, PresetEffect, preset_effects, with_rounding
from dtype_engine.results.figures import has_kl
from dtype_engine.results.meaning import meaning
from dtype_engine.results.scan import Prediction
from dtype_tui.screens.choice import ChoiceScreen
from dtype_tui.state.experiment import Experiment

_MOST_HEIGHT, _BORDERS = 0.9, 2
"""The share of the screen's height that a window of choices may have, and how many of its lines are borders."""


class PresetsScreen(ChoiceScreen[Recipe]):
    """The window in which the user chooses a preset. Its result is the preset's recipe."""

    HEADING = "Presets"
    KEYS = "↑↓ choose  ←→ rounding  Enter applies  Esc closes"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k,shift+tab", "move(-1)", "Preset above"),
        Binding("down,j,tab", "move(1)", "Preset below"),
        Binding("left,h", "rounding(-1)", "Formats rounded by the previous rule, such as gptq"),
        Binding("right,l", "rounding(1)", "Formats rounded by the next rule"),
        Binding("enter", "apply", "Replace all rules by the preset; u undoes this"),
        Binding("escape,q,p", "leave", "Close, and change nothing"),
    ]

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(len(PRESETS))
        self._experiment = experiment
        self.effects: list[PresetEffect] = []
        """The effects of the presets that have been computed, in the order of the presets."""
        self._predictions: list[dict[Recipe, Prediction]] = []
        """The drift that a scan predicts for each of `effects`, by the preset's recipe with each rounding."""
        self._rounding = ""
        """The rounding of the formats that take it, a key of `ROUNDINGS`, or "" for the nearest values."""

    def on_mount(self) -> None:
        self.run_worker(self._compute_effects, thread=True, exit_on_error=False)

    def _compute_effects(self) -> None:
        experiment = self._experiment
        for effect in preset_effects(experiment.tree, experiment.needed_bytes):
            if not self.is_attached:
                return
            predictions: dict[Recipe, Prediction] = {}
            for rounding in ("", *ROUNDINGS):
                recipe = _with_rounding(effect.recipe, rounding)
                if recipe is None or recipe in predictions:
                    continue
                if (prediction := experiment.prediction(make_plan(experiment.tree, recipe))) is not None:
                    predictions[recipe] = prediction
            self.app.call_from_thread(self._add, effect, predictions)

    def _add(self, effect: PresetEffect, predictions: dict[Recipe, Prediction]) -> None:
        self.effects.append(effect)
        self._predictions.append(predictions)
        if self.is_attached:
            self.redraw()

    def draw(self) -> Text:
        width = max(40, self.lines.size.width)
        presets = list(map(self._rounded, PRESETS.values()))
        longest = max(len(preset.name) for preset in presets)
        details, footer = self._details(presets[self.index], width), textwrap.wrap(self._footer(), width)
        shown = self._shown(len(presets), details.plain.count("\n") + 1 + len(footer))
        text = Text()
        if shown.start:
            text.append(f"  … {shown.start} above\n", style="dim")
        for index in shown:
            effect = self.effects[index] if index < len(self.effects) else None
            text.append(*self.marker(index))
            style = "bold" if index == self.index else ""
            text.append(f"{presets[index].name:<{max(16, longest + 1)}}", style=style)
            words = f"{_effect_words(effect, self._experiment.room)} {self._drift_words(index)}".rstrip()
            text.append(f"{words}\n", style="" if effect and effect.recipe else "dim")
            if index == self.index:
                text.append_text(details)
        if shown.stop < len(presets):
            text.append(f"  … {len(presets) - shown.stop} below\n", style="dim")
        for line in footer:
            text.append(f"\n{line}", style="dim")
        return text

    def _details(self, preset: Preset, width: int) -> Text:
        """Return the lines below the chosen preset: its sentence and its rules."""
        effect = self.effects[self.index] if self.index < len(self.effects) else None
        changes = f" Changes {plural(effect.tensors, 'tensor')}." if effect and effect.recipe else ""
        if effect is not None and effect.active_bytes not in (None, effect.planned_bytes):
            changes += f" A token reads {human_bytes(effect.active_bytes or 0)}."
        text = Text()
        for line in textwrap.wrap(preset.sentence + changes, width - 4):
            text.append(f"    {line}\n", style="dim")
        _append_rules(text, effect, self._rounding, width - 6)
        return text

    def _shown(self, count: int, others: int) -> range:
        """Return the indexes of the presets to show: those around the chosen one for which the window has room. others: how many
        other lines it has.
        """
        room = int(_MOST_HEIGHT * self.app.size.height) - _BORDERS - others
        if count <= room:
            return range(count)
        rows = max(1, room - 2)  # a line says how many are above, another how many are below
        first = min(max(0, self.index - rows // 2), count - rows)
        return range(first, first + rows)

    def _rounded(self, preset: Preset) -> Preset:
        """Return a preset with the chosen rounding, or as it is if none is chosen or no format of it takes the rounding."""
        return (preset.rounded(self._rounding) if self._rounding else None) or preset

    def _drift_words(self, index: int) -> str:
        """Return the drift of a preset: measured, with its word, otherwise as a scan predicts it, otherwise ""."""
        recipe = _with_rounding(self.effects[index].recipe, self._rounding) if index < len(self.effects) else None
        if recipe is None:
            return ""
        if (entry := self._experiment.measured_as(recipe)) is not None:
            output = entry.output
            drift = scientific(output.kl_mean or 0.0, 1) if has_kl(output) else decibels(output.sqnr_db)
            return f"{drift if output.is_finite else ''} {meaning(output, self._experiment.floor).word}".lstrip()
        prediction = self._predictions[index].get(recipe)
        if prediction is None:
            return ""
        return f"{scientific(prediction.value, 1) if math.isfinite(prediction.value) else 'not finite'} predicted"

    def _footer(self) -> str:
        """Return sentences with the stored bytes of the model, and with the bytes into which it must fit, if known."""
        experiment, room = self._experiment, human_bytes(self._experiment.room or 0)
        sentences = [f"Stored: {human_bytes(experiment.tree.stored_bytes)}."]
        if experiment.served.budget:
            sentences += [f"Weights, KV cache and activations at {experiment.context_words} must fit in {room}."]
        elif experiment.room:
            of = experiment.model.device or "the machine"
            sentences += [f"The weights must fit in the {room} of memory of {of}."]
        if units := {each.unit for found in self._predictions for each in found.values()}:
            so_far = "" if experiment.scan.finished else " so far"
            sentences += [f"Predicted: the drift by the scan{so_far}, in {', '.join(units)}."]
        words = ROUNDINGS[self._rounding].words if self._rounding else "to the nearest values"
        sentences += [f"Rounded {f'by {self._rounding}: ' if self._rounding else ''}{words}."]
        return " ".join([*sentences, "A preset replaces all current rules."])

    def action_rounding(self, step: int) -> None:
        offered = ("", *ROUNDINGS)
        self._rounding = offered[(offered.index(self._rounding) + step) % len(offered)]
        self.redraw()

    def action_apply(self) -> None:
        if self.index >= len(self.effects):
            return
        effect = self.effects[self.index]
        if (recipe := _with_rounding(effect.recipe, self._rounding)) is None:
            self.notify(printable(effect.reason, 500), severity="warning", markup=False)
        else:
            self.dismiss(recipe)


def _with_rounding(recipe: Recipe | None, rounding: str) -> Recipe | None:
    return Recipe.of(with_rounding(recipe.rules, rounding)) if recipe is not None and rounding else recipe


def _effect_words(effect: PresetEffect | None, room: int | None) -> str:
    if effect is None:
        return "…"
    if effect.recipe is None:
        return "available once the model has loaded" if effect.needs_classes else "nothing to do here"
    change = change_text(effect.stored_bytes, effect.planned_bytes)
    fits = " " if room is None else f"  {'fits' if effect.needed_bytes <= room else 'does not fit':<12}"
    return f"{human_bytes(effect.planned_bytes):>10}  {change:>11}{fits}"


def _append_rules(text: Text, effect: PresetEffect | None, rounding: str, width: int) -> None:
    if effect is None:
        return
    if (recipe := _with_rounding(effect.recipe, rounding)) is None:
        for line in textwrap.wrap(printable(effect.reason, 500), width):
            text.append(f"    {line}\n")
        return
    shown = recipe.rules[:8]
    for rule in shown:
        text.append(f"    {printable(rule.pattern, width - 8)} → {dtypes.short_name(rule.dtype)}\n")
    if len(recipe.rules) > len(shown):
        text.append(f"    and {len(recipe.rules) - len(shown)} more rules\n", style="dim")
