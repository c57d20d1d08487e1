"""Limits on a drift and on the user's metrics, and verdicts on whether they are met."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.core.errors import UserError

if TYPE_CHECKING:
    from dtype_engine.results.drift import OutputDrift
    from dtype_engine.results.metrics import MetricChange


@dataclass(frozen=True, slots=True)
class MetricLimit:
    """A limit on a metric of the user: on the candidate's value, or on its difference from the reference's."""

    metric: str
    limit: float
    is_most: bool
    """Whether the limit is a maximum (`--max`) and not a minimum (`--min`)."""
    is_change: bool
    """Whether the difference is limited, the candidate's value minus the reference's. If False, the candidate's value is."""

    @classmethod
    def parse(cls, text: str, is_most: bool) -> MetricLimit:
        """Parse a limit: `accuracy=0.9` or `accuracy=90%` on the value, `accuracy=-0.01` or `accuracy=-1%` on the difference. A
        number with a sign is a limit on the difference, and % divides by 100. Raises UserError.
        """
        metric, _, number = text.rpartition("=")
        if not metric or not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?%?", number):
            raise UserError(
                f"--{'max' if is_most else 'min'} {text}: give METRIC=NUMBER, such as accuracy=0.9 for the value itself, or "
                "accuracy=-1% for its change"
            )
        value = float(number.rstrip("%")) / (100 if number.endswith("%") else 1)
        return cls(metric, value, is_most, number[0] in "+-")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits on a drift. A limit that is None is not checked."""

    max_kl: float | None = None
    """The maximum mean KL, in nats per position."""
    min_sqnr: float | None = None
    """The minimum SQNR of the main output, in dB."""
    min_top1: float | None = None
    """The minimum share (0 to 1) of positions at which candidate and reference have the same most likely class."""
    metrics: tuple[MetricLimit, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.metrics) or any(limit is not None for limit in (self.max_kl, self.min_sqnr, self.min_top1))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a drift meets one limit. It does not if the limited metric was not measured, or if the output is not finite."""

    name: str
    """The option that sets the limit, without dashes at its beginning: `max_kl`, or `min accuracy`."""
    limit: float
    value: float | None
    """The measured metric, or None if the output has no such metric."""
    passed: bool
    finite: bool = True
    """Whether the output is finite."""
    what: str = ""
    """The name of the limited metric for messages."""
    unit: str = ""

    def __str__(self) -> str:
        limit = f"{self._scale * self.limit:.6g}{self.unit}"
        if self.value is None:
            return f"{self.what}: this output has none, the limit is {limit}"
        if not self.finite:
            return f"{self.what}: the output is not finite, the limit is {limit}"
        relation = (
            ("at most " if self._is_most else "at least ")
            if self.passed
            else ("over " if self._is_most else "under ") + "the limit, "
        )
        return f"{self.what} {self._scale * self.value:.6g}{self.unit}: {relation}{limit}"

    @property
    def short(self) -> str:
        """The verdict in a short form for a narrow pane, such as `KL 0.00133 > 0.0001 nats`."""
        what = self.what.removeprefix("mean ")
        if self.value is None:
            return f"no {self.what} to limit"
        if not self.finite:
            return f"{what}: output not finite"
        sign = ("≤" if self.passed else ">") if self._is_most else ("≥" if self.passed else "<")
        return f"{what} {self._scale * self.value:.4g} {sign} {self._scale * self.limit:.4g}{self.unit}"

    @property
    def _is_most(self) -> bool:
        return self.name.startswith("max")

    @property
    def _scale(self) -> int:
        return 100 if self.unit == " %" else 1


def verdicts(thresholds: Thresholds, output: OutputDrift, metrics: Iterable[MetricChange] = ()) -> tuple[Verdict, ...]:
    """Return a verdict for each limit that is set. A NaN metric meets no limit, and a non-finite output meets none on the drift.
    metrics: the user's own metrics, which were measured.
    """
    return *_of_output(thresholds, output), *_of_metrics(thresholds.metrics, {each.name: each for each in metrics})


def _of_metrics(limits: Iterable[MetricLimit], metrics: Mapping[str, MetricChange]) -> Iterator[Verdict]:
    for each in limits:
        change = metrics.get(each.metric)
        value = None if change is None else change.difference if each.is_change else change.candidate
        name = f"{'max' if each.is_most else 'min'} {each.metric}"
        what = f"change of {each.metric}" if each.is_change else each.metric
        yield Verdict(name, each.limit, value, _kept(name, each.limit, value), what=what)


def _of_output(thresholds: Thresholds, output: OutputDrift) -> Iterator[Verdict]:
    finite = not output.nonfinite and not output.nonfinite_reference
    for name, limit, value, what, unit in (
        ("max_kl", thresholds.max_kl, output.kl_mean, "mean KL", " nats"),
        ("min_sqnr", thresholds.min_sqnr, output.sqnr_db, "SQNR", " dB"),
        ("min_top1", thresholds.min_top1, output.top1_agreement, "same top-1", " %"),
    ):
        if limit is not None:
            yield Verdict(name, limit, value, _kept(name, limit, value) and finite, finite, what, unit)


def _kept(name: str, limit: float, value: float | None) -> bool:
    if value is None:
        return False
    return value <= limit if name.startswith("max") else value >= limit
