"""The values of the user's own metrics, such as an accuracy, on the reference and on the candidate, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricChange:
    """The values of a metric of the user on the reference and on the candidate, over the same examples."""

    name: str
    reference: float
    candidate: float
    error: float | None
    """The standard error of `difference`, from paired examples. For a metric that is a mean over examples, it is the standard error
    of the mean of the examples' differences. For a metric of all examples together, it is the standard deviation over resamples of
    the examples. None for a single example.
    """
    examples: int
    changed: int
    """The number of examples on which the reference and the candidate have different values."""
    resampled: bool = False
    """Whether the metric is computed from all examples together, as an F1 score is, so that its error comes from resamples. If
    False, the metric is a mean over examples.
    """

    @property
    def difference(self) -> float:
        """The candidate's metric minus the reference's."""
        return self.candidate - self.reference

    def __str__(self) -> str:
        return f"{self.short}; {self.changed:,} of {self.examples:,} examples changed"

    @property
    def short(self) -> str:
        """The metric as text, with the reference's value, the candidate's, and their difference: `0.912 → 0.908, -0.004 ±
        0.0021`.
        """
        error = "" if self.error is None else f" ± {self.error:.2g}"
        return f"{self.reference:.4g} → {self.candidate:.4g}, {self.difference:+.2g}{error}"
