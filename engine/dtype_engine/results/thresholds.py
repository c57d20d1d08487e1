"""Limits that a drift has to keep, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtype_engine.results.drift import OutputDrift


@dataclass(frozen=True, slots=True)
class Thresholds:
    """max_kl: mean KL in nats a position. min_sqnr: dB. min_top1: share of positions, 0 to 1. None: no limit."""

    max_kl: float | None = None
    min_sqnr: float | None = None
    min_top1: float | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.max_kl, self.min_sqnr, self.min_top1))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One limit: what it is called on the command line, its value, what was measured, and whether it is kept.

    `value` is None where the output has no such figure; that keeps no limit, and neither does an output that is not `finite`.
    """

    name: str
    limit: float
    value: float | None
    passed: bool
    finite: bool = True

    def __str__(self) -> str:
        what, unit = _WORDS[self.name]
        scale = 100 if unit == " %" else 1
        limit = f"{scale * self.limit:.6g}{unit}"
        if self.value is None:
            return f"{what}: this output has none, the limit is {limit}"
        if not self.finite:
            return f"{what}: the output is not finite, the limit is {limit}"
        most = self.name == "max_kl"
        asked = (
            ("at most " if most else "at least ") if self.passed else ("over " if most else "under ") + "the limit, "
        )
        return f"{what} {scale * self.value:.6g}{unit}: {asked}{limit}"

    @property
    def short(self) -> str:
        """`KL 0.00133 > 0.0001 nats`, for a narrow pane."""
        what, unit = _WORDS[self.name]
        scale = 100 if unit == " %" else 1
        if self.value is None:
            return f"no {what} to limit"
        if not self.finite:
            return f"{what.removeprefix('mean ')}: output not finite"
        sign = ("≤" if self.passed else ">") if self.name == "max_kl" else ("≥" if self.passed else "<")
        return f"{what.removeprefix('mean ')} {scale * self.value:.4g} {sign} {scale * self.limit:.4g}{unit}"


_WORDS = {"max_kl": ("mean KL", " nats"), "min_sqnr": ("SQNR", " dB"), "min_top1": ("same top", " %")}


def verdicts(thresholds: Thresholds, output: OutputDrift) -> tuple[Verdict, ...]:
    """Each limit that is set, judged. A figure that is not a number, or of an output that is not finite, keeps none."""
    asked = (
        ("max_kl", thresholds.max_kl, output.kl_mean),
        ("min_sqnr", thresholds.min_sqnr, output.sqnr_db),
        ("min_top1", thresholds.min_top1, output.top1_agreement),
    )
    finite = not output.nonfinite and not output.nonfinite_reference
    return tuple(
        Verdict(name, limit, value, _kept(name, limit, value) and finite, finite)
        for name, limit, value in asked
        if limit is not None
    )


def _kept(name: str, limit: float, value: float | None) -> bool:
    if value is None:
        return False
    return value <= limit if name == "max_kl" else value >= limit
