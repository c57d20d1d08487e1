"""Results that explain a drift: the noise floor, the causes, the first values that are not finite, and remedies for lost values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtype_engine.core.text import Name
from dtype_engine.results.drift import OutputDrift, drifts_less

REACH_OF_FLOOR = 1e-3
"""Maximum relative L2 error of a drift that may be noise. Summing in another order changes a float32 output by about 1e-7 of its
size. The rest is a margin for deep models.
"""


def near_floor(output: OutputDrift) -> bool:
    """Return whether a drift above 0 is so small that it may be below the noise floor. Only then is the floor worth measuring."""
    return 0 < output.rel_l2 <= REACH_OF_FLOOR


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The noise floor: the drift of the reference from itself when the same float32 arithmetic runs in another order."""

    ways: tuple[str, ...]
    """Descriptions of the repeated reference runs, such as "eager attention" or "batch of two". Each metric is the worst of all
    these runs. If there are none, because the model supports no such run, the floor is unknown.
    """
    positions: int
    """How many rows of the main output were compared."""
    sqnr_db: float
    max_abs: float
    rel_l2: float
    kl_mean: float | None = None
    top1_agreement: float | None = None

    def covers(self, output: OutputDrift) -> bool:
        """Return whether a drift is at most the floor, and so only noise. The two are compared by mean KL if both have it,
        otherwise by SQNR.
        """
        if not self.ways or output.nonfinite or output.max_abs == 0:
            return False
        if output.kl_mean is not None and self.kl_mean is not None:
            return output.kl_mean <= self.kl_mean
        return output.sqnr_db >= self.sqnr_db


@dataclass(frozen=True, slots=True)
class Contribution:
    """The drift that one part of the model adds to the output's drift."""

    name: Name
    """The name of the module that contains the part."""
    modules: int
    """How many modules with weights are in the part."""
    drift: float
    """The drift of the main output if only this part is cast, in the report's unit. It is infinite if the output is not finite."""
    share: float | None
    """`drift` divided by the drift of the whole recipe on the same inputs, or None if the quotient is not finite."""
    local_sqnr_db: float | None = None
    """The SQNR of the part's own output if only this part is cast. The part's inputs then equal the reference's, so the SQNR shows
    only the part's own error. None if the part is not a single module with an output to compare.
    """


@dataclass(frozen=True, slots=True)
class AttributionReport:
    """The modules in which a recipe's drift arises."""

    model: str
    rules: tuple[str, ...]
    unit: str
    """The unit of all drifts in this report."""
    whole: float
    """The drift of the whole recipe over the inputs of this report."""
    together: float
    """The sum of the contributions, which need not equal `whole`."""
    positions: int
    """How many rows of the main output were compared."""
    passes: int
    """How many forward passes were run. Some of them skipped the modules before the first module that a cast changed."""
    seconds: float
    causes: tuple[Contribution, ...]
    """The contributions, the largest first."""


@dataclass(frozen=True, slots=True)
class NonFiniteDiagnosis:
    """The place where values stop being finite, and a rule that prevents it.

    `module`, `operation` and `dtype` describe the first operation that computes a non-finite value from finite ones.
    """

    kind: Literal["weight", "activation", "reference", "unknown"]
    """The cause: "weight": values of `weights` exceed the range of the dtype. "activation": the result of an operation, or an
    activation cast for an operation, exceeds that range. "reference": the float32 reference itself is not finite.
    """
    first_module: Name
    """The first module whose output is not finite although the reference's output of this module is finite."""
    module: Name
    """The module whose code runs the operation; "" for the model itself."""
    operation: str
    dtype: str
    limit: float | None
    """The largest finite value of `dtype`."""
    weights: tuple[Name, ...]
    largest: float | None
    """The largest finite magnitude among the inputs of the operation, or among the stored values of the weights."""
    largest_reference: float | None
    """The largest magnitude of the operation's result in the reference."""
    remedy: str | None
    """A rule that was tried and makes the output finite wherever the reference is finite, or None if no such rule was found."""
    reason: str = ""
    """Why there is no remedy. If there is one: a sentence if the reference has other values that are not finite, else ""."""
    constant: float | None = None
    """A constant of the model's code that the dtype can't hold: a mask that becomes infinite, or an epsilon that becomes 0."""
    before: OutputDrift | None = None
    """The drift of the main output without the remedy."""
    after: OutputDrift | None = None
    """The drift of the main output with the remedy, over the same inputs, or None if there is no remedy."""


@dataclass(frozen=True, slots=True)
class LossRemedy:
    """Rules that keep the values which a recipe loses. The user adds them after the recipe's own rules."""

    rules: tuple[str, ...]
    tensors: tuple[Name, ...]
    """The tensors that the rules match. Each gets the nearest dtype that can hold its values."""
    planned_bytes_before: int
    """The planned bytes of the whole model without the rules."""
    planned_bytes: int
    """The planned bytes of the whole model with the rules."""
    before: OutputDrift | None = None
    """The drift of the main output without the rules, or None if the model can't be run."""
    after: OutputDrift | None = None
    """The drift of the main output with the rules, over the same inputs as `before`."""
    reason: str = ""
    """Why the model can't be run."""

    @property
    def improves(self) -> bool:
        """Whether the rules were tried and reduce the drift of the output."""
        return self.before is not None and self.after is not None and drifts_less(self.after, self.before)
