"""The engine's results for the current recipe, as frozen values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

# Importing these would delay the first paint, so they are imported where they are used.
if TYPE_CHECKING:
    from dtype_engine.results.attribution import (
        AttributionReport,
        LossRemedy,
        NoiseFloor,
        NonFiniteDiagnosis,
        PartialAttribution,
    )
    from dtype_engine.results.drift import DriftReport, ModuleDrift, PartialDrift
    from dtype_engine.results.losses import ValueLoss
    from dtype_engine.results.meaning import Word
    from dtype_engine.results.runs import SpeedReport


class Losses(msgspec.Struct, frozen=True, dict=True):
    """How many values of each weight the casts of a recipe make infinite, clip or make zero."""

    values: tuple[ValueLoss, ...] | None = None
    """One entry per weight that loses values. None while they are unknown."""
    reason: str = ""
    """Why `values` is None, or "" if the engine has yet to find the values."""

    @cached_property
    def marks(self) -> Mapping[str, str]:
        """The marks in the tree by node name, such as `⚠ 64 inf 12 zero`: of tensors that lose values, and modules above them."""
        if not self.values:
            return {}
        from dtype_tui.rendering.loss_text import loss_marks

        return loss_marks(self.values)


class Results(msgspec.Struct, frozen=True, dict=True):
    """The results for one recipe, one set of settings and one set of inputs. If any of these changes, a new `Results` is used."""

    losses: Losses = Losses()
    report: DriftReport | None = None
    partial_drift: PartialDrift | None = None
    """The drift over the inputs that have been run so far, while there is no final report."""
    modules: Mapping[str, ModuleDrift] = msgspec.field(default_factory=dict)
    """The drift of each module by name: from the report or, before, from the passes that have finished."""
    weights: Mapping[str, ModuleDrift] = msgspec.field(default_factory=dict)
    """The difference of each weight from another checkpoint that is the reference, by name."""
    loss_remedy: LossRemedy | None = None
    """Rules that keep the weight values which casts lose, or None."""
    nonfinite: NonFiniteDiagnosis | None = None
    kernels: NoiseFloor | None = None
    """By how much other kernels change the output of the candidate, which computes in 16 bits."""
    causes: AttributionReport | None = None
    partial_causes: PartialAttribution | None = None
    """The causes found so far, before `causes` is known."""
    speed: SpeedReport | None = None
    failure: str | None = None
    failed_module: str | None = None

    def worst_modules(self, count: int | None = None) -> list[ModuleDrift]:
        """Return the modules that drift most, beginning with those whose output is not finite. count: None for all."""
        from dtype_engine.results.drift import worst_modules

        measured = self.report or self.partial_drift
        return worst_modules(self.modules.values(), measured.output if measured is not None else None)[:count]

    @cached_property
    def sqnr_limits(self) -> Sequence[tuple[float, Word]]:
        """The ratings of a module's SQNR, best first: (minimum in dB, rating), such as (40.0, "small")."""
        from dtype_engine.results.meaning import sqnr_limits

        measured = self.report or self.partial_drift
        return sqnr_limits(measured.output if measured is not None else None)

    @cached_property
    def sqnr_range(self) -> tuple[float, float]:
        """The SQNRs in dB at which a module's bar is full and at which it is empty, such as (20.0, 60.0)."""
        return sqnr_range(self.modules.values())

    @property
    def origin(self) -> str:
        """The module whose code first computes a value that is not finite. "" if no code does, or if it is the model's own code."""
        found = self.nonfinite
        return (found.module if found.operation else found.first_module) if found is not None else ""

    @property
    def loss_remedy_next(self) -> bool:
        """Whether the key for remedies applies `loss_remedy` next. Rules that make the output finite are applied first."""
        return self.nonfinite is None or not self.nonfinite.remedy


def sqnr_range(modules: Iterable[ModuleDrift]) -> tuple[float, float]:
    """Return the SQNRs in dB at which a module's bar is full and at which it is empty: the lowest and the highest SQNR of the
    modules and of rounding to fp8 and bfloat16. The SQNRs of rounding keep all bars short if no module drifts much.
    """
    from dtype_engine.results.meaning import SQNR_BF16, SQNR_FP8

    measured = [drift.sqnr_db for drift in modules if drift.sqnr_db is not None and drift.is_finite]
    finite = [value for value in measured if math.isfinite(value)]
    return min([SQNR_FP8, *finite]), max([SQNR_BF16, *finite])
