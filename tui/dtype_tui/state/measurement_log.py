"""The recipes that were measured, with their figures: plain values, to be shown, compared and saved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.results.losses import severe

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport, Extent, ModuleDrift, OutputDrift


@dataclass(frozen=True, slots=True)
class MeasuredRecipe:
    """One measurement of a recipe with some settings on some inputs."""

    recipe: Recipe
    settings: RunSettings
    inputs: str
    """In words."""
    planned_bytes: int
    output: OutputDrift
    extent: Extent
    """How much of the inputs the figures are over."""
    seconds: float | None = None
    """Of the candidate's passes over all inputs; None where not all of that was run."""
    overflowed: int = 0
    """Values of weights that the casts made infinite, where that is more than rounding."""
    vanished: int = 0
    """Values of weights that the casts made zero, where that is more than rounding."""
    pinned: bool = False

    @property
    def in_part(self) -> bool:
        """Whether not all of the inputs were run."""
        return not self.extent.whole

    @property
    def kl_error(self) -> float | None:
        """How far the mean KL over all inputs may be from that in `output`, in nats: one standard error; None where unknown."""
        mean, error = self.output.kl_mean, self.extent.kl_error
        if self.extent.whole:
            return self.output.kl_mean_se
        return None if mean is None or error is None else abs(mean) * error

    def drift(self, distribution: bool) -> float | None:
        """The one figure that recipes are plotted by: mean KL in nats of a distribution, else the square of relative L2. None where
        it is not known, or the output is not finite.
        """
        value = self.output.kl_mean if distribution else 10 ** (-self.output.sqnr_db / 10)
        return None if self.output.nonfinite or value is None or math.isnan(value) else max(0.0, value)

    @property
    def key(self) -> tuple[Recipe, RunSettings, str]:
        """Equal for measurements of the same recipe with the same settings on the same inputs."""
        return self.recipe, self.settings, self.inputs


class ModuleLog:
    """The modules' drift of each measurement of this session, as long as there are no more than so many readings in all."""

    MOST = 300_000

    def __init__(self) -> None:
        self._kept: dict[tuple[Recipe, RunSettings, str], Mapping[str, ModuleDrift]] = {}

    def keep(self, entry: MeasuredRecipe, modules: Iterable[ModuleDrift]) -> None:
        """Keep these, and let the oldest go where they are too many."""
        self._kept.pop(entry.key, None)
        self._kept[entry.key] = {module.name: module for module in modules}
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self.MOST:
            del self._kept[next(iter(self._kept))]

    def of(self, entry: MeasuredRecipe) -> Mapping[str, ModuleDrift] | None:
        """By module; None where they were not kept."""
        return self._kept.get(entry.key)


def measured(report: DriftReport, recipe: Recipe, settings: RunSettings, planned_bytes: int) -> MeasuredRecipe:
    """What the history keeps of a report."""
    lost = severe(report.lost)
    return MeasuredRecipe(
        recipe,
        settings,
        report.inputs,
        planned_bytes,
        report.output,
        report.sequences,
        # A pass whose beginning was not run again is no time of the recipe's, nor is one over some of the inputs.
        seconds=None if report.seconds.reused or not report.sequences.whole else report.seconds.candidate,
        overflowed=sum(loss.overflowed for loss in lost),
        vanished=sum(loss.vanished for loss in lost),
    )


def remember(history: tuple[MeasuredRecipe, ...], new: MeasuredRecipe) -> tuple[MeasuredRecipe, ...]:
    """The history with one more measurement. One of the same recipe, settings and inputs takes the place of the earlier, unless
    that was over more of the inputs, and keeps its pin and, where it was timed only in part, its time.
    """
    for index, earlier in enumerate(history):
        if earlier.key == new.key:
            if new.in_part and (not earlier.in_part or earlier.extent.done > new.extent.done):
                return history
            seconds = earlier.seconds if new.seconds is None else new.seconds
            kept = dataclasses.replace(new, pinned=earlier.pinned, seconds=seconds)
            return (*history[:index], kept, *history[index + 1 :])
    return (*history, new)


def without_figures(history: Iterable[MeasuredRecipe], settings: RunSettings, inputs: str) -> list[Recipe]:
    """Recipes that were measured, but not with these settings over all of these inputs; each once."""
    entries = tuple(history)
    known = {
        entry.recipe for entry in entries if (entry.settings, entry.inputs) == (settings, inputs) and not entry.in_part
    }
    return list(dict.fromkeys(entry.recipe for entry in entries if entry.recipe not in known))


def toggle_pin(history: tuple[MeasuredRecipe, ...], index: int) -> tuple[MeasuredRecipe, ...]:
    """The history with the measurement at an index pinned, or no longer."""
    toggled = dataclasses.replace(history[index], pinned=not history[index].pinned)
    return (*history[:index], toggled, *history[index + 1 :])
