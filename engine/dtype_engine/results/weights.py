"""The errors of casts in each tensor, and the differences between the weights of two checkpoints, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.number_ranges import Count
from dtype_engine.core.text import Name
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.results.rounding import WeightGain


@dataclass(frozen=True, slots=True)
class WeightError:
    """The error of casting one tensor to `dtype` and back, relative to the stored values. The last five fields count elements."""

    name: Name
    stored: str
    dtype: str
    elements: int
    mean_abs: float
    max_abs: float
    rel_l2: float
    sqnr_db: float | None
    """The SQNR in dB: infinity if no value changes, minus infinity if values became infinite. None if it would mislead: some stored
    values are not finite, or the values that became zero are so small that the SQNR exceeds 200 dB.
    """
    overflowed: int
    """Number of values that are finite before the cast and infinite after it."""
    saturated: int
    """Number of values that are infinite or too large before the cast, and the dtype's largest value after it."""
    underflowed: int
    """Number of values that are not zero before the cast and zero after it."""
    subnormal: int
    """Number of values that are subnormal after the cast, with fewer bits of precision."""
    nonfinite: int
    """Number of values that are not finite before the cast."""


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
    """Pairs (exponent, number of values), the smallest exponent first."""
    zeros: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class WeightStats:
    """Statistics of one tensor's values: their exponents, and the error of a cast to each of several dtypes."""

    exponents: ExponentHistogram
    errors: tuple[WeightError, ...]
    reference: ModuleDrift | None = None
    """The drift of the tensor, as it is cast, from the reference's, if the reference has another checkpoint's weights."""
    gains: tuple[WeightGain, ...] = ()
    """What a rounding gains in each of these dtypes that takes one, or () if it was not asked for."""


@dataclass(frozen=True, slots=True)
class WeightDifference:
    """How one weight differs between two checkpoints. Δ is the candidate's values minus the reference's."""

    name: Name
    """The name in the candidate's files."""
    reference_name: Name
    """The name in the reference's files."""
    reference: str
    """The dtype or format in the reference's files, such as "bfloat16" or "gptq:int4@g128"."""
    candidate: str
    """The dtype or format in the candidate's files."""
    shape: tuple[Count, ...]
    equal: bool
    """Whether all values are equal. NaN equals NaN."""
    sqnr_db: float
    """The SQNR in dB: infinity if all values are equal, minus infinity if an element is finite in only one checkpoint."""
    max_abs: float
    """The largest |Δ|."""
    mean_abs: float
    """The mean of |Δ|."""
    rel_l2: float
    """‖Δ‖ over the norm of the reference's values: 0 if all Δ are 0, infinity if only the reference's values are all 0."""
    nonfinite: Count
    """How many of the candidate's values are not finite and differ from the reference's."""
    rows: str = ""
    """How the candidate's rows are reordered, such as "permuted as by llama.cpp, 32 heads". The metrics compare the same rows."""


@dataclass(frozen=True, slots=True)
class DifferentShape:
    """A weight whose values can't be compared, because its shapes in the two checkpoints differ."""

    name: Name
    reference: tuple[int, ...]
    candidate: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightsComparison:
    """The weights of two checkpoints, compared one by one."""

    reference: str
    """The title of the checkpoint."""
    candidate: str
    weights: tuple[WeightDifference, ...]
    """The weights that both have, sorted by SQNR, lowest first. Equal weights come last."""
    shapes: tuple[DifferentShape, ...]
    only_reference: tuple[Name, ...]
    """The weights that only the reference has."""
    only_candidate: tuple[Name, ...]
    pending: int = 0
    """How many weights are not compared yet, because the comparison was stopped."""

    @property
    def same(self) -> bool:
        """Whether both checkpoints have the same weights with equal values."""
        missing = self.shapes or self.only_reference or self.only_candidate or self.pending
        return not missing and all(weight.equal for weight in self.weights)
