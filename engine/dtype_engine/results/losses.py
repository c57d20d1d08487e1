"""What casts do to the values of weights besides rounding them, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtype_engine.core import dtypes

ROUNDING_SHARE = 0.01
"""Fewer of a tensor's values than this may become zero in a floating-point dtype, and it still is rounding."""
ROUNDING_SHARE_OF_INTEGERS = 0.5
"""The same in integers and floats of less than 8 bits, where everything under half a step becomes zero: of normally
distributed values 1 in 80 in int8, 1 in 13 in mxfp4, more with outliers.
"""


def rounding_share(dtype: str) -> float:
    """Fewer of a tensor's values than this share may become zero in a dtype by rounding alone."""
    row = dtypes.BY_NAME[dtype]
    return ROUNDING_SHARE_OF_INTEGERS if row.kind == "int" or row.bits < 8 else ROUNDING_SHARE


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """What the cast of one tensor to `dtype` lost. Counts are of elements, and exact.

    overflowed: finite before, not finite after. vanished: not zero before (and a number), zero after. channels: whole output
    channels (the first dimension of a matrix and above; a vector is one channel) that had values and are all zero after.
    saturated: beyond what a scale reaches, so brought to the largest value of a dtype with scales. nonfinite: not finite before.

    A list of losses has every tensor of which a value overflowed, saturated or, in a dtype that is computed in, vanished. In a
    dtype with scales (float8, int8) values near zero become zero as a matter of course, so a tensor is in the list only where
    that is more than rounding: see `is_rounding`.
    """

    tensor: str
    dtype: str
    overflowed: int
    vanished: int
    elements: int
    channels: int = 0
    saturated: int = 0
    nonfinite: int = 0

    @property
    def is_rounding(self) -> bool:
        """Whether it is no more than what rounding does: nothing overflowed or saturated, no whole channel became zero, and
        fewer than 1 in 100 values did (fewer than half in integers and below 8 bits).
        """
        if self.overflowed or self.saturated or self.channels:
            return False
        return self.vanished < rounding_share(self.dtype) * self.elements

    @property
    def is_listed(self) -> bool:
        """Whether it belongs in a list of losses."""
        return not self.is_rounding or (self.vanished > 0 and self.dtype not in dtypes.STORAGE_DTYPES)


def severe(losses: Sequence[ValueLoss]) -> list[ValueLoss]:
    """Those that are more than rounding: infinite values first, then by how large a share of the tensor is lost."""
    lost = [loss for loss in losses if not loss.is_rounding]
    return sorted(lost, key=lambda loss: (-loss.overflowed / loss.elements, -loss.vanished / loss.elements))
