"""What casts do to the values of each tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightError:
    """The error of casting one tensor to `dtype` and back, against the stored values. The last five fields count elements."""

    name: str
    stored: str
    """The dtype in the checkpoint."""
    dtype: str
    elements: int
    mean_abs: float
    max_abs: float
    rel_l2: float
    sqnr_db: float | None
    """Infinity where nothing differs, minus infinity where values became infinite. None where the figure would mislead: some stored
    values are not finite, or values became zero that are so much smaller than the others that the SQNR exceeds 200 dB.
    """
    overflowed: int
    """Finite before the cast, infinite after it."""
    saturated: int
    """Infinite before the cast, the largest value of the dtype after it."""
    underflowed: int
    """Not zero before the cast, zero after it."""
    subnormal: int
    """Subnormal after the cast, so with fewer bits of precision."""
    nonfinite: int
    """Not finite before the cast."""


@dataclass(frozen=True, slots=True)
class SkippedTensor:
    """A tensor on which no cast is tried, and the reason."""

    name: str
    dtype: str
    why: str


@dataclass(frozen=True, slots=True)
class ExponentHistogram:
    """A histogram of the exponents, floor(log2 |x|), of a tensor's values."""

    name: str
    counts: tuple[tuple[int, int], ...]
    """Pairs of an exponent and how many values have it, the smallest exponent first."""
    zeros: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class WeightStats:
    """Statistics of one tensor's values: their exponents, and the error of a cast to each of several dtypes."""

    exponents: ExponentHistogram
    errors: tuple[WeightError, ...]
