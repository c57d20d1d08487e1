"""Limits on a drift and on the user's metrics, and whether a measurement meets them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from dtype_engine.core.errors import UserError
from dtype_engine.results.figures import FIGURES
from dtype_engine.results.groups import group_label, limit_name

if TYPE_CHECKING:
    from dtype_engine.results.drift import OutputDrift
    from dtype_engine.results.metrics import MetricChange


_SPACINGS = 4
"""How many relative spacings of floats a value may be beyond a limit."""


def meets(value: float, limit: float, is_most: bool, *parts: float, epsilon: float = 2.0**-52) -> bool:
    """Return whether a value is at most a limit (`is_most`) or at least a limit. NaN is neither. It tolerates rounding errors of up
    to four spacings of floats at the largest of these numbers, so that 0.99 - 1.0 counts as one per cent less.

    parts: the numbers whose difference is the value. epsilon: the relative spacing of floats.
    """
    slack = _SPACINGS * epsilon * max(abs(each) for each in (value, limit, *parts, 0.0) if math.isfinite(each))
    return value <= limit + slack if is_most else value >= limit - slack


def told_apart(value: float, limit: float, digits: int) -> tuple[str, str]:
    """Return a value that misses a limit, and this limit, as texts. They have `digits` digits, or more if they would be equal."""
    texts = ((f"{value:.{count}g}", f"{limit:.{count}g}") for count in (digits, 9, 12, 17))
    return next((both for both in texts if both[0] != both[1]), (str(value), str(limit)))


class Limit(msgspec.Struct, frozen=True):
    """A limit on a figure of the output or on one of the user's metrics."""

    option: str
    """The option that sets the limit: `max_kl`, or `min accuracy` for `--min accuracy=...`. An upper limit begins with `max`."""
    name: str
    limit: float
    is_change: bool = False
    """Whether the candidate's value minus the reference's is limited, rather than the candidate's value."""
    group: str = ""
    """The full name of the group of positions whose figure is limited, such as `confidence:0.95-1`, or "" for all positions."""

    @classmethod
    def parse(cls, text: str, kind: Literal["min", "max"]) -> Limit:
        """Parse the value of `--min` or `--max`, such as `accuracy=90%`. A number with a sign limits the change, as in
        `accuracy=-1%`. Raises UserError.
        """
        name, _, number = text.rpartition("=")
        if not name or not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?%?", number):
            raise UserError(
                f"--{kind} {text}: give METRIC=NUMBER, such as accuracy=0.9 for the value itself, or accuracy=-1% for its change"
            )
        value = float(number.rstrip("%")) / (100 if number.endswith("%") else 1)
        return cls(f"{kind} {name}", name, value, number[0] in "+-")


class Verdict(msgspec.Struct, frozen=True):
    """Whether a measured drift meets one limit."""

    name: str
    """The `option` of the limit."""
    limit: float
    value: float | None
    """The measured value, or None if it was not measured."""
    passed: bool
    finite: bool = True
    """Whether the output is finite and what is limited is no NaN, in the reference and in the candidate."""
    what: str = ""
    """The name of the limited value, such as "mean KL"."""
    unit: str = ""

    def __str__(self) -> str:
        value, limit = self._texts(6)
        if self.value is None:
            return f"{self.what}: this output has none, the limit is {limit}"
        if not self.finite:
            return f"{self.what}: not finite in the reference or in the candidate, the limit is {limit}"
        words = ("at most", "over the limit,") if self._is_most else ("at least", "under the limit,")
        return f"{self.what} {value}{self.unit}: {words[not self.passed]} {limit}"

    @property
    def short(self) -> str:
        """The verdict for a narrow pane, such as `KL 0.00133 > 0.0001 nats`."""
        what = self.what.removeprefix("mean ")
        if self.value is None:
            return f"no {self.what} to limit"
        if not self.finite:
            return f"{what}: not finite"
        value, limit = self._texts(4)
        return f"{what} {value} {('≤>' if self._is_most else '≥<')[not self.passed]} {limit}"

    def _texts(self, digits: int) -> tuple[str, str]:
        """Return (value without unit, limit) as texts, with more than `digits` digits if the limit is only just missed."""
        scale = 100 if self.unit == " %" else 1
        pair = scale * (self.value or 0.0), scale * self.limit
        value, limit = (f"{each:.{digits}g}" for each in pair) if self.passed else told_apart(*pair, digits)
        return value, f"{limit}{self.unit}"

    @property
    def _is_most(self) -> bool:
        return self.name.startswith("max")


def settings_of_limits(texts: Iterable[str]) -> frozenset[str]:
    """Return the fields of `RunSettings` that measure the figures which values of `--min` and `--max` limit, as `acceptance=95%`
    limits the acceptance. Figures that are always measured need none.
    """
    rows = (FIGURES.get(text.rpartition("=")[0]) for text in texts)
    return frozenset(row.setting for row in rows if row is not None and row.setting)


def verdicts(limits: Iterable[Limit], output: OutputDrift, metrics: Iterable[MetricChange] = ()) -> tuple[Verdict, ...]:
    """Return whether the output and the user's metrics meet each limit. A value meets no limit if it was not measured, or if it is
    NaN in the reference or in the candidate. If the output is not finite in one of the two, no limit is met.
    """
    changes = {each.name: each for each in metrics}
    return tuple(_verdict(each, output, changes.get(each.name)) for each in limits)


def _verdict(limit: Limit, output: OutputDrift, change: MetricChange | None) -> Verdict:
    figure = FIGURES.get(limit.name)
    sides: tuple[float, ...] = ()
    epsilon = 2.0**-52
    if figure is not None and limit.group:
        value, unit = _of_group(limit, output), figure.unit
        what = f"{figure.label} ({group_label(limit_name(limit.group))})"
    elif figure is not None and (change is None or figure.option == limit.option):
        value, what, unit = figure.of(output), figure.label, figure.unit
    else:
        value = None if change is None else change.difference if limit.is_change else change.candidate
        what, unit = f"change of {limit.name}" if limit.is_change else limit.name, ""
        if change is not None:
            sides, epsilon = (change.reference, change.candidate), change.epsilon
    finite = output.is_finite and not any(map(math.isnan, (0.0 if value is None else value, *sides)))
    parts, is_most = sides if limit.is_change else (), limit.option.startswith("max")
    kept = value is not None and meets(value, limit.limit, is_most, *parts, epsilon=epsilon)
    return Verdict(limit.option, limit.limit, value, kept and finite, finite, what, unit)


def _of_group(limit: Limit, output: OutputDrift) -> float | None:
    """Return the limited figure of a group, None if the group has no positions, or NaN if the reference is not finite."""
    group = output.group(limit.group)
    if group is not None:
        return float(getattr(group, limit.name))
    return output.kl_mean if output.kl_mean is not None and math.isnan(output.kl_mean) else None
