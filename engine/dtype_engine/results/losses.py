"""The values of weights that casts lose, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtype_engine.core import dtypes

ROUNDING_SHARE = 0.01
"""If a smaller share of a tensor's values becomes zero in a floating-point dtype, that counts as rounding."""
ROUNDING_SHARE_OF_INTEGERS = 0.5
"""The same share for integers and for floats of less than 8 bits, where all values under half a step become zero: of normally
distributed values 1 in 80 in int8 and 1 in 13 in mxfp4, and more where there are outliers.
"""


def rounding_share(dtype: str) -> float:
    """The share (0 to 1) below which values that become zero in a dtype count as rounding."""
    row = dtypes.BY_NAME[dtype]
    return ROUNDING_SHARE_OF_INTEGERS if row.kind == "int" or row.bits < 8 else ROUNDING_SHARE


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """How many elements the cast of one tensor to `dtype` lost. The counts are exact.

    A list of losses contains every tensor with a value that overflowed or saturated, or that vanished in a dtype used for
    computing. In a dtype with scales (float8, int8) values near zero always become zero, so a tensor with such values is in the
    list only where that is more than rounding (see `is_rounding`).
    """

    tensor: str
    dtype: str
    overflowed: int
    """Finite before the cast, not finite after it."""
    vanished: int
    """A number other than zero before the cast, zero after it."""
    elements: int
    """All elements of the tensor."""
    channels: int = 0
    """Output channels (indexes of the first dimension; a vector is one channel) that only the cast made all zero."""
    saturated: int = 0
    """Beyond the range of the scale, so clipped to the largest value of a dtype with scales."""
    nonfinite: int = 0
    """Not finite before the cast."""

    @property
    def is_rounding(self) -> bool:
        """Whether the loss is only rounding: nothing overflowed or saturated, no whole channel became zero, and fewer than 1 in 100
        values did (fewer than half in integers and below 8 bits).
        """
        if self.overflowed or self.saturated or self.channels:
            return False
        return self.vanished < rounding_share(self.dtype) * self.elements

    @property
    def is_listed(self) -> bool:
        """Whether the tensor belongs in a list of losses (see the class)."""
        return not self.is_rounding or (self.vanished > 0 and self.dtype not in dtypes.STORAGE_DTYPES)


def severe(losses: Sequence[ValueLoss]) -> list[ValueLoss]:
    """The losses that are more than rounding. The largest share of overflowed values comes first, then of vanished values."""
    lost = [loss for loss in losses if not loss.is_rounding]
    return sorted(lost, key=lambda loss: (-loss.overflowed / loss.elements, -loss.vanished / loss.elements))
