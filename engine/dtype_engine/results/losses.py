"""How many values of a weight a cast makes infinite or zero, or clips, as plain data. This program calls such values lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.text import Name

_ROUNDING_SHARE = 0.01
"""If a cast makes a smaller fraction of a tensor's values zero than this, that may count as ordinary rounding. For the coarse
dtypes of `_rounds_to_zero`, any fraction may.
"""


def _rounds_to_zero(dtype: str) -> bool:
    """Return whether a dtype is so coarse that making small values zero is ordinary rounding: an integer, or a float of less than 8
    bits. In such a dtype, all values under half a step become zero. Of normally distributed values, these are 1 in 80 in int8 and 1
    in 13 in mxfp4, and more if there are outliers.
    """
    row = dtypes.BY_NAME[dtype]
    return row.kind == "int" or row.bits < 8


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """How many values of one tensor the cast to `dtype` made infinite or zero, or clipped to the dtype's largest value. The counts
    are exact.

    Casts to dtypes with scales (float8, int8) always make some small values zero, which is ordinary rounding (`is_rounding`). Lists
    of casts for the user leave out tensors with no other change.
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
    """The number of output channels in which more than half of the nonzero values became zero. A channel is an index of the
    tensor's first dimension. A vector counts as one channel. In a block format, each row of the matrices into which the weight is
    divided counts as a channel.
    """
    saturated: int = 0
    """If `dtype` has scales: the number of values that were too large for the scale and were clipped to the dtype's largest
    value.
    """
    nonfinite: int = 0
    """The number of values that were not finite before the cast."""

    @property
    def is_rounding(self) -> bool:
        """Whether the cast did no more than round small values to zero: no value became infinite or was clipped, every channel kept
        at least half of its values, and fewer than 1 in 100 values became zero. For integers and floats of less than 8 bits, any
        number of values may become zero.
        """
        if self.overflowed or self.saturated or self.channels:
            return False
        return _rounds_to_zero(self.dtype) or self.vanished < _ROUNDING_SHARE * self.elements

    @property
    def is_listed(self) -> bool:
        """Whether this tensor is shown to the user in lists of casts that make values infinite or zero. It is if the cast did more
        than ordinary rounding, or made values zero in a dtype without scales.
        """
        return not self.is_rounding or (self.vanished > 0 and self.dtype not in dtypes.STORAGE_DTYPES)


def total(losses: Sequence[ValueLoss]) -> ValueLoss:
    """Return the loss of a whole tensor. losses: those of its parts, at least one, such as the experts that it holds; all in the
    same dtype.
    """
    return ValueLoss(
        tensor=losses[0].tensor,
        dtype=losses[0].dtype,
        overflowed=sum(loss.overflowed for loss in losses),
        vanished=sum(loss.vanished for loss in losses),
        elements=sum(loss.elements for loss in losses),
        channels=sum(loss.channels for loss in losses),
        saturated=sum(loss.saturated for loss in losses),
        nonfinite=sum(loss.nonfinite for loss in losses),
    )


def severe(losses: Sequence[ValueLoss]) -> list[ValueLoss]:
    """Return the entries of `losses` in which a cast did more than round small values to zero. Those with the largest fraction of
    values that became infinite come first, then those with the largest fraction that became zero.
    """
    lost = [loss for loss in losses if not loss.is_rounding]
    return sorted(lost, key=lambda loss: (-loss.overflowed / loss.elements, -loss.vanished / loss.elements))
