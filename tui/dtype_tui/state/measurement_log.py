"""The recipes that were measured, with their figures: plain values, to be shown, compared and saved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.losses import severe

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport, Extent, ModuleDrift, OutputDrift


@dataclass(frozen=True, slots=True)
class MeasuredRecipe:
    """One measurement. Bytes are planned ones; the other figures are those of `readings.DriftReport`. overflowed, vanished: values
    of weights that the casts made infinite and zero, where that is more than rounding. sequences, all_sequences: that were run, and
    that there are; kl_mean_se is how far the mean over all of them may be where not all were. Both 0: not known, all were.
    """

    rules: tuple[str, ...]
    settings: str
    inputs: str
    planned_bytes: int
    sqnr_db: float
    max_abs: float
    nonfinite: int
    seconds: float | None = None
    kl_mean: float | None = None
    kl_mean_se: float | None = None
    top1_agreement: float | None = None
    perplexity: float | None = None
    pinned: bool = False
    overflowed: int = 0
    vanished: int = 0
    sequences: int = 0
    all_sequences: int = 0

    @property
    def in_part(self) -> bool:
        """Whether not all of the inputs were run."""
        return self.sequences < self.all_sequences

    @property
    def recipe(self) -> Recipe:
        """Its rules, to put in force again."""
        return Recipe.of(Rule.parse(rule) for rule in self.rules)

    def drift(self, distribution: bool) -> float | None:
        """The one figure that recipes are plotted by: mean KL in nats of a distribution, else the square of relative L2. None where
        it is not known, or the output is not finite.
        """
        value = self.kl_mean if distribution else 10 ** (-self.sqnr_db / 10)
        return None if self.nonfinite or value is None or math.isnan(value) else max(0.0, value)

    @property
    def key(self) -> tuple[tuple[str, ...], str, str]:
        """What makes two measurements ones of the same."""
        return self.rules, self.settings, self.inputs


class ModuleLog:
    """The modules' drift of each measurement of this session, as long as there are no more than so many readings in all."""

    MOST = 300_000

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[str, ...], str, str], Mapping[str, ModuleDrift]] = {}

    def keep(self, entry: MeasuredRecipe, modules: Mapping[str, ModuleDrift]) -> None:
        """Keep these, and let the oldest go where they are too many."""
        self._kept.pop(entry.key, None)
        self._kept[entry.key] = modules
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self.MOST:
            del self._kept[next(iter(self._kept))]

    def keep_report(self, entry: MeasuredRecipe, report: DriftReport) -> None:
        """As `keep`, of all modules of a report."""
        self.keep(entry, {reading.name: reading for reading in report.modules})

    def of(self, entry: MeasuredRecipe) -> Mapping[str, ModuleDrift] | None:
        """By module; None where they were not kept."""
        return self._kept.get(entry.key)


def measured(report: DriftReport, planned_bytes: int) -> MeasuredRecipe:
    """What the history keeps of a report."""
    lost = severe(report.lost)
    return dataclasses.replace(
        measured_in_part(report.output, report.sequences, report.rules, report.settings, report.inputs, planned_bytes),
        # A pass whose beginning was not run again is no time of the recipe's, nor is one over some of the inputs.
        seconds=None if report.seconds.reused or not report.sequences.whole else report.seconds.candidate,
        overflowed=sum(loss.overflowed for loss in lost),
        vanished=sum(loss.vanished for loss in lost),
    )


def measured_in_part(
    output: OutputDrift, extent: Extent, rules: tuple[str, ...], settings: str, inputs: str, planned_bytes: int
) -> MeasuredRecipe:
    """What the history keeps of the figures of a measurement that is under way, or was stopped."""
    error = output.kl_mean_se
    if not extent.whole:
        error = None
        if output.kl_mean is not None and extent.kl_error is not None:
            error = abs(output.kl_mean) * extent.kl_error
    return MeasuredRecipe(
        rules=rules,
        settings=settings,
        inputs=inputs,
        planned_bytes=planned_bytes,
        sqnr_db=output.sqnr_db,
        max_abs=output.max_abs,
        nonfinite=output.nonfinite,
        kl_mean=output.kl_mean,
        kl_mean_se=error,
        top1_agreement=output.top1_agreement,
        perplexity=output.perplexity_candidate,
        sequences=extent.done,
        all_sequences=extent.total,
    )


def remember(history: list[MeasuredRecipe], new: MeasuredRecipe) -> MeasuredRecipe:
    """Add a measurement; one of the same recipe, settings and inputs takes the place of the earlier, unless that was over more of
    the inputs, and keeps its pin and, where it was timed only in part, its time. Returns `new`.
    """
    for index, earlier in enumerate(history):
        if earlier.key == new.key:
            if new.in_part and (not earlier.in_part or earlier.sequences > new.sequences):
                return new
            seconds = earlier.seconds if new.seconds is None else new.seconds
            history[index] = dataclasses.replace(new, pinned=earlier.pinned, seconds=seconds)
            return new
    history.append(new)
    return new


def without_figures(history: list[MeasuredRecipe], settings: str, inputs: str) -> list[Recipe]:
    """Recipes that were measured, but not with these settings over all of these inputs; each once."""
    known = {
        entry.rules for entry in history if (entry.settings, entry.inputs) == (settings, inputs) and not entry.in_part
    }
    return list(dict.fromkeys(entry.recipe for entry in history if entry.rules not in known))


def toggle_pin(history: list[MeasuredRecipe], index: int) -> None:
    """Pin the measurement at an index, or let it go again."""
    history[index] = dataclasses.replace(history[index], pinned=not history[index].pinned)
