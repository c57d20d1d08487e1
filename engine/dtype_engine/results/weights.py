"""What casts do to the values of each tensor, and how the weights of two checkpoints differ, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.text import Name
from dtype_engine.results.drift import ModuleDrift


@dataclass(frozen=True, slots=True)
class WeightError:
    """The error of casting one tensor to `dtype` and back, relative to the stored values. The last five fields are numbers of
    elements.
    """

    name: Name
    stored: str
    """The dtype of the tensor in the checkpoint."""
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
    """If the reference has the weights of another checkpoint: the difference between the tensor, as it is currently cast, and the
    reference's tensor. Otherwise None.
    """


@dataclass(frozen=True, slots=True)
class WeightDifference:
    """How one weight differs between two checkpoints, the reference and the candidate. Δ is the candidate's values minus the
    reference's.
    """

    name: Name
    """The weight's name in the candidate's files."""
    reference_name: Name
    """The weight's name in the reference's files."""
    reference: str
    """The dtype or format in which the reference's files store the weight, such as "bfloat16" or "gptq:int4@g128"."""
    candidate: str
    """The dtype or format in which the candidate's files store the weight."""
    shape: tuple[int, ...]
    """The shape of the compared values."""
    equal: bool
    """Whether all values are equal. NaN equals NaN."""
    sqnr_db: float
    """The SQNR of the candidate's values, in dB: infinity if all are equal to the reference's, minus infinity if an element is
    finite in only one of the two checkpoints.
    """
    max_abs: float
    """The largest |Δ|, where Δ is the candidate's value minus the reference's."""
    mean_abs: float
    """The mean of |Δ|, where Δ is the candidate's value minus the reference's."""
    rel_l2: float
    """The L2 norm of Δ (candidate minus reference) divided by that of the reference's values: 0 if all Δ are 0, infinity if only
    the reference's values are all 0.
    """
    nonfinite: int
    """The number of the candidate's values that are not finite and differ from the reference's."""
    rows: str = ""
    """How the candidate's rows are reordered relative to the reference's, such as "permuted as by llama.cpp, 32 heads", or "" if
    they are not. The metrics compare each row with the same row in the other order.
    """


@dataclass(frozen=True, slots=True)
class DifferentShape:
    """A weight that has different shapes in the two checkpoints, so that its values can't be compared."""

    name: Name
    reference: tuple[int, ...]
    """The weight's shape in the reference checkpoint."""
    candidate: tuple[int, ...]
    """The weight's shape in the candidate checkpoint."""


@dataclass(frozen=True, slots=True)
class WeightsComparison:
    """The weights of two checkpoints, the reference and the candidate, compared one by one."""

    reference: str
    """The title of the reference checkpoint, as the user sees it."""
    candidate: str
    """The title of the candidate checkpoint, as the user sees it."""
    weights: tuple[WeightDifference, ...]
    """The compared weights, those with the lowest SQNR first, and equal ones last."""
    shapes: tuple[DifferentShape, ...]
    """The weights whose values were not compared, because their shapes differ."""
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
