"""Limits on a drift, and verdicts on whether a drift meets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtype_engine.results.drift import OutputDrift


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits on a drift. A limit that is None is not checked."""

    max_kl: float | None = None
    """The maximum mean KL, in nats per position."""
    min_sqnr: float | None = None
    """The minimum SQNR of the main output, in dB."""
    min_top1: float | None = None
    """The minimum share (0 to 1) of positions at which candidate and reference have the same most likely class."""

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.max_kl, self.min_sqnr, self.min_top1))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a drift meets one limit. It does not if the limited metric was not measured, or if the output is not finite."""

    name: str
    """The name of the limit in `Thresholds`."""
    limit: float
    value: float | None
    """The measured metric, or None if the output has no such metric."""
    passed: bool
    finite: bool = True
    """Whether the output is finite."""

    def __str__(self) -> str:
        what, unit = _WORDS[self.name]
        scale = 100 if unit == " %" else 1
        limit = f"{scale * self.limit:.6g}{unit}"
        if self.value is None:
            return f"{what}: this output has none, the limit is {limit}"
        if not self.finite:
            return f"{what}: the output is not finite, the limit is {limit}"
        most = self.name == "max_kl"
        relation = (
            ("at most " if most else "at least ") if self.passed else ("over " if most else "under ") + "the limit, "
        )
        return f"{what} {scale * self.value:.6g}{unit}: {relation}{limit}"

    @property
    def short(self) -> str:
        """The verdict in a short form for a narrow pane, such as `KL 0.00133 > 0.0001 nats`."""
        what, unit = _WORDS[self.name]
        scale = 100 if unit == " %" else 1
        if self.value is None:
            return f"no {what} to limit"
        if not self.finite:
            return f"{what.removeprefix('mean ')}: output not finite"
        sign = ("≤" if self.passed else ">") if self.name == "max_kl" else ("≥" if self.passed else "<")
        return f"{what.removeprefix('mean ')} {scale * self.value:.4g} {sign} {scale * self.limit:.4g}{unit}"


_WORDS = {"max_kl": ("mean KL", " nats"), "min_sqnr": ("SQNR", " dB"), "min_top1": ("same top-1", " %")}


def verdicts(thresholds: Thresholds, output: OutputDrift) -> tuple[Verdict, ...]:
    """Return a verdict for each limit that is set. A NaN metric meets no limit, and neither does a non-finite output."""
    limits = (
        ("max_kl", thresholds.max_kl, output.kl_mean),
        ("min_sqnr", thresholds.min_sqnr, output.sqnr_db),
        ("min_top1", thresholds.min_top1, output.top1_agreement),
    )
    finite = not output.nonfinite and not output.nonfinite_reference
    return tuple(
        Verdict(name, limit, value, _kept(name, limit, value) and finite, finite)
        for name, limit, value in limits
        if limit is not None
    )


def _kept(name: str, limit: float, value: float | None) -> bool:
    if value is None:
        return False
    return value <= limit if name == "max_kl" else value >= limit
