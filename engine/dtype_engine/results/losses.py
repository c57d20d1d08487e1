"""The values of weights that casts lose, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.text import Name

ROUNDING_SHARE = 0.01
"""If the share of a tensor's values that become zero in a floating-point dtype is below this, the loss counts as rounding."""
ROUNDING_SHARE_OF_INTEGERS = 0.5
"""`ROUNDING_SHARE` for integers and for floats of less than 8 bits, in which all values under half a step become zero. Of normally
distributed values, these are 1 in 80 in int8 and 1 in 13 in mxfp4, and more if there are outliers.
"""


def rounding_share(dtype: str) -> float:
    """Return the share (0 to 1) below which values that become zero in a dtype count as rounding."""
    row = dtypes.BY_NAME[dtype]
    return ROUNDING_SHARE_OF_INTEGERS if row.kind == "int" or row.bits < 8 else ROUNDING_SHARE


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """How many elements of one tensor its cast to `dtype` lost. The counts are exact.

    A list of losses contains every tensor with a value that overflowed or saturated, or that vanished in a dtype used for
    computing. In a dtype with scales (float8, int8) values near zero always become zero, so a tensor that lost only these is listed
    only if the loss is more than rounding (see `is_rounding`).
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
    """The number of output channels (first dimension; a vector is one channel) whose values the cast made all zero."""
    saturated: int = 0
    """The number of values beyond the range of the scale, which were clipped to the largest value of a dtype with scales."""
    nonfinite: int = 0
    """The number of values that were not finite before the cast."""

    @property
    def is_rounding(self) -> bool:
        """Whether the loss is only rounding: nothing overflowed or saturated, no whole channel became zero, and fewer than 1 in 100
        values became zero (fewer than half in integers and below 8 bits).
        """
        if self.overflowed or self.saturated or self.channels:
            return False
        return self.vanished < rounding_share(self.dtype) * self.elements

    @property
    def is_listed(self) -> bool:
        """Whether a list of losses contains the tensor (see the class)."""
        return not self.is_rounding or (self.vanished > 0 and self.dtype not in dtypes.STORAGE_DTYPES)


def severe(losses: Sequence[ValueLoss]) -> list[ValueLoss]:
    """Return the losses that are more than rounding, sorted by the share of overflowed, then of vanished values, largest first."""
    lost = [loss for loss in losses if not loss.is_rounding]
    return sorted(lost, key=lambda loss: (-loss.overflowed / loss.elements, -loss.vanished / loss.elements))
