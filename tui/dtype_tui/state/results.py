"""What the engine has found of the recipe in force: frozen values, replaced whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from dtype_tui.rendering.loss_text import loss_marks

if TYPE_CHECKING:
    from dtype_engine.results.attribution import AttributionReport, LossRemedy, NonFiniteDiagnosis
    from dtype_engine.results.drift import DriftReport, ModuleDrift, PartialDrift
    from dtype_engine.results.losses import ValueLoss


@dataclass(frozen=True)
class Losses:
    """The weights whose values the casts lose."""

    values: tuple[ValueLoss, ...] | None = None
    """None while they are not known."""
    reason: str = ""
    """Why they are not known, where nothing will change that by itself."""

    @cached_property
    def marks(self) -> Mapping[str, str]:
        """What the tree says of each node that loses values."""
        return loss_marks(self.values or ())


@dataclass(frozen=True)
class Results:
    """Another recipe, other settings or other inputs begin with an empty one."""

    losses: Losses = Losses()
    report: DriftReport | None = None
    partial_drift: PartialDrift | None = None
    """The output's drift so far, of a measurement that has no report."""
    modules: Mapping[str, ModuleDrift] = field(default_factory=dict)
    """By name; those of the report, or of the passes so far."""
    loss_remedy: LossRemedy | None = None
    """Rules that keep values which casts lose."""
    nonfinite: NonFiniteDiagnosis | None = None
    causes: AttributionReport | None = None
    failure: str | None = None
    """Why the run failed, where it did."""
    failed_module: str | None = None

    def worst_modules(self, count: int | None = None) -> list[ModuleDrift]:
        """Modules that drift most, those with non-finite outputs first; none where nothing differs."""
        from dtype_engine.results.drift import worst_modules  # not for the first paint

        return worst_modules(self.modules.values())[:count]

    @property
    def loss_remedy_next(self) -> bool:
        """Whether the key for remedies applies the rules that keep values: what makes an output finite comes before them."""
        return self.nonfinite is None or self.nonfinite.remedy is None


def measured_modules(report: DriftReport) -> Mapping[str, ModuleDrift]:
    return {module.name: module for module in report.modules}
