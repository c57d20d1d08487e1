"""The values of the user's own metrics, such as an accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.number_ranges import Count


@dataclass(frozen=True, slots=True)
class MetricChange:
    """The values of a metric on the reference and on the candidate, over the same examples."""

    name: str
    reference: float
    candidate: float
    error: float | None
    """The standard error of `difference`: of the mean of the examples' differences or, if `resampled`, the standard deviation over
    resamples of the examples. None for a single example, and if the metric is defined on fewer than two resamples.
    """
    examples: Count
    changed: Count
    """The number of examples on which reference and candidate have different values."""
    resampled: bool = False
    """Whether the metric is computed from all examples together, as an F1 score is. Otherwise it is a mean over examples."""
    undefined: Count = 0
    """On how many resamples the metric is undefined, as a precision is where nothing is found. `error` leaves them out."""
    draws: Count = 0
    """The number of all resamples."""
    epsilon: float = 2.0**-52
    """The relative spacing of the floats in which the metric was computed: that of float64, or of float32."""

    @property
    def difference(self) -> float:
        return self.candidate - self.reference

    def __str__(self) -> str:
        text = f"{self.short}; {self.changed:,} of {self.examples:,} examples changed"
        left_out = f"; undefined on {self.undefined:,} of {self.draws:,} resamples, left out"
        return text + left_out if self.undefined else text

    @property
    def short(self) -> str:
        """The values as text: `0.912 → 0.908, -0.004 ± 0.0021`."""
        error = "" if self.error is None else f" ± {self.error:.2g}"
        return f"{self.reference:.4g} → {self.candidate:.4g}, {self.difference:+.2g}{error}"
