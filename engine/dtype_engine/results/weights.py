"""The effects of casts on the values of each tensor."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.text import Name
from dtype_engine.results.drift import ModuleDrift


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
    reference: ModuleDrift | None = None
    """How far the tensor, as it is currently cast, is from the reference's, if drift is measured from another checkpoint's
    weights. Otherwise None.
    """


@dataclass(frozen=True, slots=True)
class WeightDifference:
    """The difference Δ = candidate - reference between the values that two checkpoints have for one weight."""

    name: Name
    """The weight's name in the candidate's files."""
    reference_name: Name
    """The weight's name in the reference's files."""
    reference: str
    """The dtype in the reference's files."""
    candidate: str
    """The dtype in the candidate's files."""
    shape: tuple[int, ...]
    """The shape of the compared values."""
    equal: bool
    """Whether all values are equal. NaN equals NaN."""
    sqnr_db: float
    """The SQNR of the candidate's values, in dB: infinity if all are equal, minus infinity if only one of two values is finite."""
    max_abs: float
    mean_abs: float
    rel_l2: float
    nonfinite: int
    """The number of values that are not finite in the candidate and differ from the reference."""
    rows: str = ""
    """How the candidate orders the rows, if in another way than the reference: a phrase such as "permuted as by llama.cpp, 32
    heads". The metrics are those of the same rows. "" if the order is the same.
    """


@dataclass(frozen=True, slots=True)
class DifferentShape:
    """A weight that has another shape in the candidate than in the reference, so that its values can't be compared."""

    name: Name
    reference: tuple[int, ...]
    candidate: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightsComparison:
    """The weights of two checkpoints, compared one by one."""

    reference: str
    """The title of the reference."""
    candidate: str
    """The title of the candidate."""
    weights: tuple[WeightDifference, ...]
    """The compared weights, those with the lowest SQNR first."""
    shapes: tuple[DifferentShape, ...]
    only_reference: tuple[Name, ...]
    """The weights that only the reference has."""
    only_candidate: tuple[Name, ...]
    """The weights that only the candidate has."""
    pending: int = 0
    """How many weights are not compared yet, because the comparison was stopped."""

    @property
    def same(self) -> bool:
        """Whether both checkpoints have the same weights with equal values."""
        missing = self.shapes or self.only_reference or self.only_candidate or self.pending
        return not missing and all(weight.equal for weight in self.weights)
