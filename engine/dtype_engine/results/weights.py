"""The effects of casts on the values of each tensor."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.text import Name


@dataclass(frozen=True, slots=True)
class WeightError:
    """The error of casting one tensor to `dtype` and back, relative to the stored values. The last five fields count elements."""

    name: Name
    stored: str
    """The dtype in the checkpoint."""
    dtype: str
    elements: int
    mean_abs: float
    max_abs: float
    rel_l2: float
    sqnr_db: float | None
    """The SQNR of the values after the cast, in dB: infinity if no value changes, minus infinity if values became infinite. None if
    the SQNR would mislead: some stored values are not finite, or the values that became zero are so small that the SQNR exceeds 200
    dB.
    """
    overflowed: int
    """The number of values that were finite before the cast and are infinite after it."""
    saturated: int
    """The number of values that were infinite before the cast and are the dtype's largest value after it."""
    underflowed: int
    """The number of values that were not zero before the cast and are zero after it."""
    subnormal: int
    """The number of values that are subnormal after the cast, and so have fewer bits of precision."""
    nonfinite: int
    """The number of values that were not finite before the cast."""


@dataclass(frozen=True, slots=True)
class SkippedTensor:
    """A tensor that no rule can cast, and the reason."""

    name: Name
    dtype: str
    why: str


@dataclass(frozen=True, slots=True)
class ExponentHistogram:
    """A histogram of the exponents, floor(log2 |x|), of a tensor's values."""

    name: Name
    counts: tuple[tuple[int, int], ...]
    """Pairs of an exponent and the number of values that have it, the smallest exponent first."""
    zeros: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class WeightStats:
    """Statistics of one tensor's values: their exponents, and the error of a cast to each of several dtypes."""

    exponents: ExponentHistogram
    errors: tuple[WeightError, ...]
