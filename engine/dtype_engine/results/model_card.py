"""The figures of a model card, and the rule by which a repeated measurement confirms them.

The card fixes the weights, the rules, the settings and the tokens, so a repeated measurement differs only by the order in which
numbers are added: other threads, another processor, other versions of the libraries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dtype_engine.results.attribution import NoiseFloor
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.figures import FIGURES, figures_in

ERRORS = 3.0
"""How many standard errors, those of both measurements combined, a figure may differ from the card's."""
_ERROR_OF_ERROR = 0.5
"""By which part of the repeated standard error the card's may differ from it. A card with a larger one would hold for any value."""
_DECIBELS = 0.1
"""By how much an SQNR may differ beside what the noise floor allows, in decibels."""
_KERNELS = 0.25
"""By which part of a drift other kernels may change it if the candidate computes in 16 bits. Plain instead of vector instructions
changed a KL in bfloat16 by 0.03 of it."""
_DECIBELS_IN_16_BITS = 1.0
"""The same for an SQNR: a quarter more or less power."""
_DIGITS = 6
"""Significant digits of a figure on a card."""
_ROUNDING = 10.0**-_DIGITS * 10
"""The relative error that comes from these digits, with room for the same in the repeated measurement."""
COUNTS = {
    "positions": "positions of the output, such as tokens, that were compared",
    "reference_bytes": "bytes of the reference's tensors as stored",
    "bytes": "bytes of this model's tensors, with scales",
}
"""The numbers on a card besides the rows of `FIGURES`, by name, and what each is. They are equal in a repeated measurement."""


@dataclass(frozen=True, slots=True)
class CardFigure:
    """A figure on a card."""

    name: str
    """The name of a row of `FIGURES` or of an entry of `COUNTS`."""
    value: float
    error: float | None = None
    """Its standard error, or None if it has none."""

    @property
    def texts(self) -> tuple[str, str]:
        """The value and the error as a card has them. The error is "" if there is none."""
        value = f"{self.value:.0f}" if self.name in COUNTS else f"{self.value:.{_DIGITS}g}"
        return value, "" if self.error is None else f"{self.error:.2g}"

    @property
    def text(self) -> str:
        """The value with its error, such as `0.0012 ± 3.1e-05`."""
        return " ± ".join(filter(None, self.texts))


@dataclass(frozen=True, slots=True)
class RepeatedFigure:
    """A figure of a card beside the same figure of a repeated measurement."""

    name: str
    card: CardFigure
    now: CardFigure | None
    """The repeated figure, or None if this output has no such figure."""
    allowed: float
    """By how much the two values may differ: 0 for counts. For an SQNR, by how many decibels it may be lower."""
    holds: bool


@dataclass(frozen=True, slots=True)
class CardCheck:
    """A model card beside a repeated measurement."""

    file: str
    """The file with the card."""
    inputs: str
    """The inputs of the repeated measurement, which are those of the card."""
    figures: tuple[RepeatedFigure, ...]
    differences: tuple[str, ...] = ()
    """What was otherwise when the card was made, such as "torch 2.12.0 on the card, 2.13.0 here"."""


def card_figures(report: DriftReport, reference_bytes: int, model_bytes: int) -> tuple[CardFigure, ...]:
    """Return the figures of a measurement that a card has, and the counts. The bytes are those of all tensors."""
    rows = [(row, row.of(report.output)) for row in figures_in("card")]
    figures = [CardFigure(row.name, value, row.error_of(report.output)) for row, value in rows if value is not None]
    counts = {"positions": report.sequences.positions, "reference_bytes": reference_bytes, "bytes": model_bytes}
    return *figures, *(CardFigure(name, value) for name, value in counts.items())


def repeated_figures(
    card: Sequence[CardFigure], now: Sequence[CardFigure], floor: NoiseFloor | None, in_16_bits: bool
) -> tuple[RepeatedFigure, ...]:
    """Return each figure of a card beside the repeated one. floor: the noise floor of the reference in the repeated measurement, or
    None if it is unknown. in_16_bits: whether the candidate may compute in 16 bits, where other kernels round otherwise.

    A value holds if it differs from the card's by at most 3 √(a² + b²), where a and b are the two standard errors, and what the
    noise allows, and if a differs from b by at most half of b and the same. With a floor of f nats the noise allows 2 √(KL f) + f
    for a KL: the square root of a small KL is a distance, that of the Fisher metric, so √KL changes by √f at most. For a share, it
    allows the share of positions at which the floor's runs differ, and one position. The relative L2 error, which an SQNR says in
    decibels, may differ by that of the floor and by 0.1 dB. In 16 bits, a quarter of the KL, a quarter of what the share lacks to
    1, and 1 dB come on top. Counts must be equal.
    """
    known = {figure.name: figure for figure in now}
    positions = max((figure.value for figure in now if figure.name == "positions"), default=1.0) or 1.0
    return tuple(_repeated(figure, known.get(figure.name), floor, positions, in_16_bits) for figure in card)


def _repeated(
    card: CardFigure, now: CardFigure | None, floor: NoiseFloor | None, positions: float, in_16_bits: bool
) -> RepeatedFigure:
    if now is None or card.name in COUNTS:
        return RepeatedFigure(card.name, card, now, 0.0, now is not None and now.value == card.value)
    unit, kernels = FIGURES[card.name].unit, _KERNELS if in_16_bits else 0.0
    if unit == " dB":
        before, after = (_relative_error(figure.value) for figure in (card, now))
        most = _DECIBELS + (_DECIBELS_IN_16_BITS if in_16_bits else 0.0)
        allowed = before * (10 ** (most / 20) - 1) + (floor.rel_l2 if floor is not None else 0.0)
        decibels = 20 * math.log10(1 + allowed / before) if before else math.inf
        return RepeatedFigure(card.name, card, now, decibels, abs(after - before) <= allowed)
    noise = _ROUNDING * abs(now.value)
    if unit == " nats":
        least = (floor.kl_mean if floor is not None else None) or 0.0
        noise += 2 * math.sqrt(max(now.value, 0.0) * least) + least + kernels * abs(now.value)
    elif unit == " %":
        same = None if floor is None else floor.top1_agreement
        noise += (0.0 if same is None else 1 - same) + 1 / positions + kernels * (1 - now.value)
    errors = card.error or 0.0, now.error or 0.0
    allowed = ERRORS * math.hypot(*errors) + noise
    same_error = abs(errors[0] - errors[1]) <= _ERROR_OF_ERROR * errors[1] + noise
    return RepeatedFigure(card.name, card, now, allowed, same_error and abs(now.value - card.value) <= allowed)


def _relative_error(decibels: float) -> float:
    """Return the relative L2 error that an SQNR says, which is 0 for an exact output. A card may have any number of decibels."""
    return float(10 ** min(-decibels / 20, 300.0))
