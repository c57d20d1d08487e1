"""What casts do to the values of weights, tensor by tensor. Counts are of elements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightError:
    """What casting one tensor to `dtype` and back does to its values.

    Errors are of the value that comes back against the stored one, over all elements. Counts are of elements: overflowed
    (finite, then infinite), saturated (infinite, then the dtype's largest), underflowed (not zero, then zero), subnormal in the
    dtype (there with fewer bits), nonfinite (before the cast). `sqnr_db`: infinity where nothing differs, minus infinity where
    values became infinite, None where a figure would read as praise: some values were not finite, which have no error, or some
    became zero that are so small beside the others that it is above 200 dB.
    """

    name: str
    stored: str
    dtype: str
    elements: int
    mean_abs: float
    max_abs: float
    rel_l2: float
    sqnr_db: float | None
    overflowed: int
    saturated: int
    underflowed: int
    subnormal: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class SkippedTensor:
    """A tensor that no cast is tried on, and why."""

    name: str
    dtype: str
    why: str


@dataclass(frozen=True, slots=True)
class ExponentHistogram:
    """How many of a tensor's values have which exponent, floor(log2 |x|): pairs (exponent, count), smallest first."""

    name: str
    counts: tuple[tuple[int, int], ...]
    zeros: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class WeightStats:
    """All there is to know of one tensor's values: their exponents, and the round-trip error in several dtypes."""

    exponents: ExponentHistogram
    errors: tuple[WeightError, ...]
