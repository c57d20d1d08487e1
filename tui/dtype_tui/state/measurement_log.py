"""The recipes that were measured, with their figures: plain values, to be shown, compared and saved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.losses import severe

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport


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

    @property
    def key(self) -> tuple[tuple[str, ...], str, str]:
        """What makes two measurements ones of the same."""
        return self.rules, self.settings, self.inputs


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
