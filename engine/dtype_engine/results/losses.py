"""How many values of a weight a cast makes infinite or zero, or clips, as plain data. This program calls such values lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtype_engine.core import dtypes
from dtype_engine.core.text import Name

_ROUNDING_SHARE = 0.01
"""If a cast makes a smaller share of a tensor's values zero, this may be ordinary rounding."""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The exact numbers of values of one tensor that the cast to `dtype` made infinite or zero, or clipped to the dtype's largest
    value.

    Casts to dtypes with scales (float8, int8) always make some small values zero, which is ordinary rounding (`is_rounding`). Lists
    for the user leave out tensors with only such zeros.
    """

    tensor: Name
    dtype: str
    overflowed: int
    """Number of values that are finite before the cast but not after it."""
    vanished: int
    """Number of values that are not zero before the cast but zero after it."""
    elements: int
    channels: int = 0
    """Number of output channels in which more than half of the nonzero values became zero. A channel is an index of the first
    dimension or, in a block format, a row of the matrices into which the weight is divided. A vector is one channel.
    """
    saturated: int = 0
    """Number of values that were too large for the scale, and were clipped to the dtype's largest value."""
    nonfinite: int = 0
    """Number of values that are not finite before the cast."""

    @property
    def is_rounding(self) -> bool:
        """Whether no value became infinite or was clipped, every channel kept at least half of its values, and fewer than 1 in 100
        values became zero. In integers and in floats of less than 8 bits, any number of values may become zero.
        """
        if self.overflowed or self.saturated or self.channels:
            return False
        # All values under half a step become zero: 1 in 80 normally distributed values in int8, 1 in 13 in mxfp4.
        row = dtypes.BY_NAME[self.dtype]
        return row.kind == "int" or row.bits < 8 or self.vanished < _ROUNDING_SHARE * self.elements

    @property
    def is_listed(self) -> bool:
        """Whether lists for the user include this tensor. They do if it lost more than rounding, or if values became zero in a
        dtype without scales.
        """
        return not self.is_rounding or (self.vanished > 0 and self.dtype not in dtypes.STORAGE_DTYPES)


def total(losses: Sequence[ValueLoss]) -> ValueLoss:
    """Return the loss of a tensor as the sum over its parts, such as packed experts. losses: at least one, all in one dtype."""
    counts = ("overflowed", "vanished", "elements", "channels", "saturated", "nonfinite")
    return replace(losses[0], **{name: sum(getattr(loss, name) for loss in losses) for name in counts})


def severe(losses: Sequence[ValueLoss]) -> list[ValueLoss]:
    """Return the losses that are not only rounding, sorted by the share that became infinite, then zero, largest first."""
    lost = [loss for loss in losses if not loss.is_rounding]
    return sorted(lost, key=lambda loss: (-loss.overflowed / loss.elements, -loss.vanished / loss.elements))
