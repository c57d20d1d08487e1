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
    from dtype_engine.results.drift import DriftReport, ModuleDrift


@dataclass(frozen=True, slots=True)
class MeasuredRecipe:
    """One measurement. Bytes are planned ones; the other figures are those of `readings.DriftReport`. overflowed, vanished: values
    of weights that the casts made infinite and zero, where that is more than rounding.
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

    def of(self, entry: MeasuredRecipe) -> Mapping[str, ModuleDrift] | None:
        """By module; None where they were not kept."""
        return self._kept.get(entry.key)


def measured(report: DriftReport, planned_bytes: int) -> MeasuredRecipe:
    """What the history keeps of a report."""
    output, lost = report.output, severe(report.lost)
    return MeasuredRecipe(
        rules=report.rules,
        settings=report.settings,
        inputs=report.inputs,
        planned_bytes=planned_bytes,
        sqnr_db=output.sqnr_db,
        max_abs=output.max_abs,
        nonfinite=output.nonfinite,
        # A pass whose beginning was not run again is no time of the recipe's.
        seconds=None if report.seconds.reused else report.seconds.candidate,
        kl_mean=output.kl_mean,
        kl_mean_se=output.kl_mean_se,
        top1_agreement=output.top1_agreement,
        perplexity=output.perplexity_candidate,
        overflowed=sum(loss.overflowed for loss in lost),
        vanished=sum(loss.vanished for loss in lost),
    )


def remember(history: list[MeasuredRecipe], new: MeasuredRecipe) -> None:
    """Add a measurement; one of the same recipe, settings and inputs takes the place of the earlier, and keeps its pin and,
    where it was timed only in part, its time.
    """
    for index, earlier in enumerate(history):
        if earlier.key == new.key:
            seconds = earlier.seconds if new.seconds is None else new.seconds
            history[index] = dataclasses.replace(new, pinned=earlier.pinned, seconds=seconds)
            return
    history.append(new)


def toggle_pin(history: list[MeasuredRecipe], index: int) -> None:
    """Pin the measurement at an index, or let it go again."""
    history[index] = dataclasses.replace(history[index], pinned=not history[index].pinned)
