"""The values of weights that casts lose, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.text import Name

_ROUNDING_SHARE = 0.01
"""If the share of a tensor's values that become zero in a floating-point dtype is below this, the loss may count as rounding."""


def _rounds_to_zero(dtype: str) -> bool:
    """Return whether a dtype is an integer or a float of less than 8 bits. In these, all values under half a step become zero, as
    rounding: of normally distributed values 1 in 80 in int8 and 1 in 13 in mxfp4, and more if there are outliers.
    """
    row = dtypes.BY_NAME[dtype]
    return row.kind == "int" or row.bits < 8


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """How many elements of one tensor were lost in its cast to `dtype`: they overflowed, saturated or became zero. The counts are
    exact.

    Casts to dtypes with scales (float8, int8) always round values near zero to zero. A list of losses leaves out tensors with no
    loss other than such rounding; `is_rounding` defines it.
    """

    tensor: Name
    dtype: str
    overflowed: int
    """The number of values that were finite before the cast but not after it."""
    vanished: int
    """The number of values that were not zero before the cast but zero after it."""
    elements: int
    """The number of elements of the tensor."""
    channels: int = 0
    """The number of output channels that lost more than half of their nonzero values. A channel is a row of the first dimension, a
    vector is one channel, and in a block format a row of blocks is one.
    """
    saturated: int = 0
    """The number of values beyond the range of the scale, which were clipped to the largest value of a dtype with scales."""
    nonfinite: int = 0
    """The number of values that were not finite before the cast."""

    @property
    def is_rounding(self) -> bool:
        """Whether the loss is only rounding: nothing overflowed or saturated, every channel kept at least half of its values, and
        fewer than 1 in 100 values became zero (any number in integers and below 8 bits).
        """
        if self.overflowed or self.saturated or self.channels:
            return False
        return _rounds_to_zero(self.dtype) or self.vanished < _ROUNDING_SHARE * self.elements

    @property
    def is_listed(self) -> bool:
        """Whether a list of losses includes this one: it is more than rounding, or values became zero in a dtype without scales."""
        return not self.is_rounding or (self.vanished > 0 and self.dtype not in dtypes.STORAGE_DTYPES)


def severe(losses: Sequence[ValueLoss]) -> list[ValueLoss]:
    """Return the losses that are more than rounding, those with the largest fraction of overflowed, then vanished values first."""
    lost = [loss for loss in losses if not loss.is_rounding]
    return sorted(lost, key=lambda loss: (-loss.overflowed / loss.elements, -loss.vanished / loss.elements))
