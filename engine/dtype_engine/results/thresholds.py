"""Limits on a drift and on the user's metrics, and whether a measurement meets them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from dtype_engine.core.errors import UserError
from dtype_engine.results.figures import FIGURES

if TYPE_CHECKING:
    from dtype_engine.results.drift import OutputDrift
    from dtype_engine.results.metrics import MetricChange


class Limit(msgspec.Struct, frozen=True):
    """A limit on a figure of the output or on one of the user's metrics."""

    option: str
    """The option that sets the limit: `max_kl`, or `min accuracy` for `--min accuracy=...`. An upper limit begins with `max`."""
    name: str
    limit: float
    is_change: bool = False
    """Whether the candidate's value minus the reference's is limited, rather than the candidate's value."""

    @classmethod
    def parse(cls, text: str, kind: Literal["min", "max"]) -> Limit:
        """Parse the value of `--min` or `--max`: `accuracy=90%` or, with a sign, a limit on the change: `accuracy=-1%`. Raises
        UserError.
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
    """Whether all values of the output are finite."""
    what: str = ""
    """The name of the limited value, such as "mean KL"."""
    unit: str = ""

    def __str__(self) -> str:
        limit = f"{self._scale * self.limit:.6g}{self.unit}"
        if self.value is None:
            return f"{self.what}: this output has none, the limit is {limit}"
        if not self.finite:
            return f"{self.what}: the output is not finite, the limit is {limit}"
        words = ("at most", "over the limit,") if self._is_most else ("at least", "under the limit,")
        return f"{self.what} {self._scale * self.value:.6g}{self.unit}: {words[not self.passed]} {limit}"

    @property
    def short(self) -> str:
        """The verdict for a narrow pane, such as `KL 0.00133 > 0.0001 nats`."""
        what = self.what.removeprefix("mean ")
        if self.value is None:
            return f"no {self.what} to limit"
        if not self.finite:
            return f"{what}: output not finite"
        signs = "≤>" if self._is_most else "≥<"
        return (
            f"{what} {self._scale * self.value:.4g} {signs[not self.passed]} {self._scale * self.limit:.4g}{self.unit}"
        )

    @property
    def _is_most(self) -> bool:
        return self.name.startswith("max")

    @property
    def _scale(self) -> int:
        return 100 if self.unit == " %" else 1


def verdicts(limits: Iterable[Limit], output: OutputDrift, metrics: Iterable[MetricChange] = ()) -> tuple[Verdict, ...]:
    """Return whether the output and the user's metrics meet each limit. NaN, a value that was not measured, and figures of an
    output that is not finite meet no limit.
    """
    changes = {each.name: each for each in metrics}
    return tuple(_verdict(each, output, changes.get(each.name)) for each in limits)


def _verdict(limit: Limit, output: OutputDrift, change: MetricChange | None) -> Verdict:
    figure = FIGURES.get(limit.name)
    if figure is not None and (change is None or figure.option == limit.option):
        value, finite = figure.of(output), not output.nonfinite and not output.nonfinite_reference
        what, unit = figure.label, figure.unit
    else:
        value = None if change is None else change.difference if limit.is_change else change.candidate
        what, unit, finite = f"change of {limit.name}" if limit.is_change else limit.name, "", True
    kept = value is not None and (value <= limit.limit if limit.option.startswith("max") else value >= limit.limit)
    return Verdict(limit.option, limit.limit, value, kept and finite, finite, what, unit)
