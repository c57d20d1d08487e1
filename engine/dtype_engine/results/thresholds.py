"""Limits on a drift and on the user's metrics, and whether a measurement meets them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from dtype_engine.core.errors import UserError
from dtype_engine.results.figures import FIGURES, Figure

if TYPE_CHECKING:
    from dtype_engine.results.drift import OutputDrift
    from dtype_engine.results.metrics import MetricChange


class MetricLimit(msgspec.Struct, frozen=True):
    """A limit on one of the user's metrics: on its value for the candidate, or on how far this is from the reference's value. Or a
    limit on a figure of the output.
    """

    metric: str
    """The name of the metric or, if there is no metric of this name, of the figure."""
    limit: float
    is_most: bool
    """Whether the limit is a maximum (`--max`) and not a minimum (`--min`)."""
    is_change: bool
    """What is limited. True: the candidate's value minus the reference's. False: the candidate's value. It does not matter for a
    figure of the output.
    """

    @classmethod
    def parse(cls, text: str, is_most: bool) -> MetricLimit:
        """Parse a limit on a metric. `accuracy=0.9` and `accuracy=90%` limit the candidate's value. A number with a sign, as in
        `accuracy=-0.01` or `accuracy=-1%`, limits its difference from the reference's value. % divides by 100. Raises UserError.
        """
        metric, _, number = text.rpartition("=")
        if not metric or not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?%?", number):
            raise UserError(
                f"--{'max' if is_most else 'min'} {text}: give METRIC=NUMBER, such as accuracy=0.9 for the value itself, or "
                "accuracy=-1% for its change"
            )
        value = float(number.rstrip("%")) / (100 if number.endswith("%") else 1)
        return cls(metric, value, is_most, number[0] in "+-")


class Thresholds(msgspec.Struct, frozen=True):
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


class Verdict(msgspec.Struct, frozen=True):
    """Whether a measured drift meets one limit. If the limited metric was not measured, or if the output is not finite, it does
    not.
    """

    name: str
    """The command-line option that sets the limit, without dashes at its beginning: `max_kl`, `max kl_p99` for a figure of the
    output, or `min accuracy` for a metric of the user.
    """
    limit: float
    value: float | None
    """The measured value of the limited metric, or None if it was not measured."""
    passed: bool
    finite: bool = True
    """Whether all values of the output are finite."""
    what: str = ""
    """The name of the limited metric in messages, such as "mean KL"."""
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
    """Return for each limit in `thresholds` whether the measurement meets it. A value that is NaN meets no limit, and an output
    that is not finite meets no limit on the drift. metrics: the measured values of the user's own metrics.
    """
    changes = {each.name: each for each in metrics}
    rows = sorted((row for row in FIGURES.values() if row.option), key=lambda row: row.option)
    options = ((row, getattr(thresholds, row.option)) for row in rows)
    found = [_of_figure(row.option, limit, row, output) for row, limit in options if limit is not None]
    for each in thresholds.metrics:
        name, row = f"{'max' if each.is_most else 'min'} {each.metric}", FIGURES.get(each.metric)
        if row is not None and each.metric not in changes:
            found.append(_of_figure(name, each.limit, row, output))
        else:
            found.append(_of_metric(name, each, changes.get(each.metric)))
    return tuple(found)


def _of_figure(name: str, limit: float, figure: Figure, output: OutputDrift) -> Verdict:
    finite, value = not output.nonfinite and not output.nonfinite_reference, figure.of(output)
    return Verdict(name, limit, value, _kept(name, limit, value) and finite, finite, figure.label, figure.unit)


def _of_metric(name: str, limit: MetricLimit, change: MetricChange | None) -> Verdict:
    value = None if change is None else change.difference if limit.is_change else change.candidate
    what = f"change of {limit.metric}" if limit.is_change else limit.metric
    return Verdict(name, limit.limit, value, _kept(name, limit.limit, value), what=what)


def _kept(name: str, limit: float, value: float | None) -> bool:
    if value is None:
        return False
    return value <= limit if name.startswith("max") else value >= limit
