"""Measured recipes and their metrics, as plain values that can be shown, compared and saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport, Extent, ModuleDrift, OutputDrift
    from dtype_engine.results.losses import ValueLoss
    from dtype_engine.results.metrics import MetricChange

MOST_MEASURED = 1000
"""Maximum number of measurements in the history. An engine on another machine could send any number."""
_MARKS = "123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class MeasuredRecipe(msgspec.Struct, frozen=True):
    """One measurement of a recipe, with the settings and the inputs that were used."""

    recipe: Recipe
    settings: RunSettings
    inputs: str
    planned_bytes: int
    output: OutputDrift
    extent: Extent
    """How many of the inputs were run."""
    seconds: float | None = None
    """Seconds that the candidate's passes took. None if some inputs or modules were not run."""
    overflowed: int | None = None
    """Number of weight values that the casts made infinite, or None if they were not counted."""
    vanished: int | None = None
    """Number of nonzero weight values that the casts made zero, without rounding (`ValueLoss.is_rounding`). None if not counted."""
    pinned: bool = False
    metrics: tuple[MetricChange, ...] = ()

    @property
    def in_part(self) -> bool:
        """Whether the metrics cover only some of the inputs."""
        return not self.extent.whole

    def drift(self, distribution: bool) -> float | None:
        """Return the drift by which plots compare recipes: the mean KL in nats if the output is a distribution, otherwise the
        squared relative L2 error. None if it is unknown or not finite.
        """
        value = self.output.kl_mean if distribution else 10 ** (-(self.output.sqnr_db or 0.0) / 10)
        return None if not self.output.is_finite or value is None or math.isnan(value) else max(0.0, value)

    def metric(self, name: str) -> MetricChange | None:
        return next((change for change in self.metrics if change.name == name), None)

    def height(self, axis: str, distribution: bool) -> float | None:
        """Return the value for the vertical axis of a plot: the user's metric `axis` or, if `axis` is "", `drift`. None if
        unknown.
        """
        if not axis:
            return self.drift(distribution)
        change = self.metric(axis)
        return None if change is None or math.isnan(change.candidate) else change.candidate

    @property
    def key(self) -> tuple[Recipe, RunSettings, str]:
        """The identity of a measurement. The history keeps only one measurement with each key."""
        return self.recipe, self.settings, self.inputs


class ModuleLog:
    """The drift of every module for the measurements made since the app started. The oldest measurements are dropped first."""

    MOST = 300_000
    """Maximum number of stored module drifts, summed over all measurements."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Recipe, RunSettings, str], Mapping[str, ModuleDrift]] = {}

    def keep(self, entry: MeasuredRecipe, modules: Iterable[ModuleDrift]) -> None:
        self._kept.pop(entry.key, None)
        self._kept[entry.key] = {module.name: module for module in modules}
        while len(self._kept) > 1 and (
            len(self._kept) > MOST_MEASURED or sum(map(len, self._kept.values())) > self.MOST
        ):
            del self._kept[next(iter(self._kept))]

    def of(self, entry: MeasuredRecipe) -> Mapping[str, ModuleDrift] | None:
        """Return the drift of a measurement's modules by name, or None if it is not stored."""
        return self._kept.get(entry.key)


def measured(report: DriftReport, recipe: Recipe, settings: RunSettings, planned_bytes: int) -> MeasuredRecipe:
    """Return a drift report as an entry of the history. planned_bytes: the size of the model under the recipe."""
    overflowed, vanished = lost_counts(report.lost)
    return MeasuredRecipe(
        recipe,
        settings,
        report.inputs,
        planned_bytes,
        report.output,
        report.sequences,
        # The time of a pass that reused earlier outputs, or covered only some inputs, is not the time of the recipe.
        seconds=None if report.seconds.reused or not report.sequences.whole else report.seconds.candidate,
        overflowed=overflowed,
        vanished=vanished,
        metrics=report.metrics,
    )


def lost_counts(losses: Sequence[ValueLoss] | None) -> tuple[int | None, int | None]:
    """Return (`overflowed`, `vanished`) of a `MeasuredRecipe`. losses: the lost values of each weight, or None if not counted."""
    if losses is None:
        return None, None
    from dtype_engine.results.losses import severe  # imported late, for a faster first paint

    lost = severe(losses)
    return sum(loss.overflowed for loss in lost), sum(loss.vanished for loss in lost)


def metric_names(entries: Iterable[MeasuredRecipe]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(change.name for entry in entries for change in entry.metrics))


def mark(index: int) -> str:
    """Return the character that stands for the measurement at an index of the history."""
    return _MARKS[index] if index < len(_MARKS) else "+"


def remember(history: tuple[MeasuredRecipe, ...], new: MeasuredRecipe) -> tuple[MeasuredRecipe, ...]:
    """Return the history with a measurement added.

    The new measurement replaces an earlier one with the same key, unless the earlier one covers more inputs. It keeps the earlier
    one's pin and, if it has no time of its own, the earlier one's time. If the history exceeds `MOST_MEASURED`, the oldest
    measurement that is not pinned is dropped.
    """
    for index, earlier in enumerate(history):
        if earlier.key == new.key:
            if new.in_part and (not earlier.in_part or earlier.extent.done > new.extent.done):
                return history
            seconds = earlier.seconds if new.seconds is None else new.seconds
            kept = msgspec.structs.replace(new, pinned=earlier.pinned, seconds=seconds)
            return (*history[:index], kept, *history[index + 1 :])
    if len(history) >= MOST_MEASURED:
        oldest = next((index for index, earlier in enumerate(history) if not earlier.pinned), 0)
        history = (*history[:oldest], *history[oldest + 1 :])
    return (*history, new)


def without_figures(history: Iterable[MeasuredRecipe], settings: RunSettings, inputs: str) -> list[Recipe]:
    """Return each recipe of the history that was never measured with these settings on all of these inputs."""
    entries = tuple(history)
    known = {
        entry.recipe for entry in entries if (entry.settings, entry.inputs) == (settings, inputs) and not entry.in_part
    }
    return list(dict.fromkeys(entry.recipe for entry in entries if entry.recipe not in known))


def toggle_pin(history: tuple[MeasuredRecipe, ...], index: int) -> tuple[MeasuredRecipe, ...]:
    toggled = msgspec.structs.replace(history[index], pinned=not history[index].pinned)
    return (*history[:index], toggled, *history[index + 1 :])
