"""What casts do to the values of weights besides rounding them, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.core import dtypes

if TYPE_CHECKING:
    from dtype_engine.results.drift import OutputDrift

ROUNDING_SHARE = 0.01
"""Fewer of a tensor's values than this may become zero in a floating-point dtype, and it still is rounding."""
ROUNDING_SHARE_OF_INTEGERS = 0.5
"""The same in int8, where everything under half a step becomes zero: 1 in 80 of normally distributed values, more with outliers."""


def rounding_share(dtype: str) -> float:
    """Fewer of a tensor's values than this share may become zero in a dtype by rounding alone."""
    return ROUNDING_SHARE_OF_INTEGERS if dtypes.BY_NAME[dtype].kind == "int" else ROUNDING_SHARE


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
        fewer than 1 in 100 values did (fewer than half in int8).
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


@dataclass(frozen=True, slots=True)
class LossRemedy:
    """Rules that keep the values of the weights that a recipe loses, to come after its own.

    tensors: those that the rules take, each to the nearest dtype that holds its values. planned_bytes_before, planned_bytes: of
    the whole model. before, after: the drift of the main output without and with the rules, measured over the same inputs; None
    where the model can't be run, and `reason` says why.
    """

    rules: tuple[str, ...]
    tensors: tuple[str, ...]
    planned_bytes_before: int
    planned_bytes: int
    before: OutputDrift | None = None
    after: OutputDrift | None = None
    reason: str = ""

    @property
    def improves(self) -> bool:
        """Whether it was tried and the output drifts less with it."""
        return self.before is not None and self.after is not None and drifts_less(self.after, self.before)


def drifts_less(one: OutputDrift, other: OutputDrift) -> bool:
    """Whether an output drifts less than another: by values that are not finite, then by mean KL, else by relative L2."""
    if one.nonfinite != other.nonfinite:
        return one.nonfinite < other.nonfinite
    if one.kl_mean is not None and other.kl_mean is not None:
        return one.kl_mean < other.kl_mean
    return one.rel_l2 < other.rel_l2
