"""To what the roundings of a recipe were fitted, and their effect on text that they were not fitted to."""

from __future__ import annotations

import msgspec

from dtype_engine.core.text import Name
from dtype_engine.results.drift import Extent, OutputDrift


class FittedTo(msgspec.Struct, frozen=True):
    """The calibration inputs to which roundings such as GPTQ were fitted."""

    inputs: str
    """A description, such as "pod.txt: 32 sequences of your text, 16,384 tokens"."""
    fingerprint: str
    """A hash of all tensors of the inputs."""


class WeightGain(msgspec.Struct, frozen=True):
    """By how much a rounding lowers the error that a weight's format causes in its layer."""

    name: Name
    dtype: str
    """The format with the rounding, such as "int4@g32:gptq"."""
    gain: float | None
    """The squared error of the layer's output with the nearest values, divided by that with the rounded ones, both summed over the
    calibration inputs: tr(D H Dᵀ) with the change D of the weight and H = E[x xᵀ], or the diagonal of H if the rounding needs no
    more. None if no matrix product uses the weight, which then keeps the nearest values.
    """


class HeldOut(msgspec.Struct, frozen=True):
    """The drift of a recipe on held-out inputs: others than those on which drift is measured, or to which roundings are fitted."""

    inputs: str
    """A description of the inputs."""
    output: OutputDrift
    """The drift under the recipe."""
    extent: Extent
    nearest: OutputDrift | None
    """The drift under the recipe without its roundings, so with the nearest values. None if it has no roundings."""

    @property
    def kl(self) -> tuple[float, float] | None:
        """(KL under the recipe, KL with the nearest values), or None if either is unknown."""
        if self.nearest is None or self.output.kl_mean is None or self.nearest.kl_mean is None:
            return None
        return self.output.kl_mean, self.nearest.kl_mean

    @property
    def lost(self) -> bool:
        """Whether the roundings make the drift larger on these inputs, by more than the standard errors of both."""
        if self.kl is None or self.nearest is None:
            return False
        errors = sum(each.kl_mean_se or 0.0 for each in (self.output, self.nearest))
        return self.kl[0] > self.kl[1] + errors

    @property
    def sentence(self) -> str:
        """A notice for the user if the roundings lost on these inputs, or ""."""
        if not self.lost or self.kl is None:
            return ""
        rounded, nearest = self.kl
        return (
            f"on {self.inputs} the roundings lost: KL {rounded:.3e} nats with them, {nearest:.3e} with the nearest values; fit "
            "them to text that is more like it, or use :imatrix, which is less bound to its text"
        )
