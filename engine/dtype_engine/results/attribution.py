"""Results that explain a drift: the noise floor, the modules that cause the drift, the first values that are not finite, and rules
that keep casts from making values infinite or zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtype_engine.core.text import Name
from dtype_engine.results.drift import OutputDrift, drifts_less

REACH_OF_FLOOR = 1e-3
"""The largest relative L2 error of an output with which its drift may be mere noise, so that the noise floor is measured. Summing
in another order changes a float32 output by about 1e-7 of its size; the limit is higher because the noise grows in deep models.
"""


def near_floor(output: OutputDrift) -> bool:
    """Return whether the output differs from the reference by so little that the drift may be noise. If so, the noise floor should
    be measured.
    """
    return 0 < output.rel_l2 <= REACH_OF_FLOOR


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The noise floor: the drift of the reference from itself when the same float32 arithmetic runs in another order."""

    ways: tuple[str, ...]
    """Descriptions of the repeated reference runs, such as "eager attention" or "batch of two". Each metric of the floor is the
    worst over all these runs. If the list is empty, because the model supports no such run, the floor is unknown.
    """
    positions: int
    """How many positions of the main output (its rows, such as tokens) were compared."""
    sqnr_db: float
    max_abs: float
    rel_l2: float
    kl_mean: float | None = None
    top1_agreement: float | None = None

    def covers(self, output: OutputDrift) -> bool:
        """Return whether a drift may be only noise, because it is not above the noise floor. The drift and the floor are compared
        by mean KL if both have one, otherwise by SQNR.
        """
        if not self.ways or output.nonfinite or output.max_abs == 0:
            return False
        if output.kl_mean is not None and self.kl_mean is not None:
            return output.kl_mean <= self.kl_mean
        return output.sqnr_db >= self.sqnr_db


@dataclass(frozen=True, slots=True)
class Contribution:
    """The drift of the main output if the recipe casts only the weights in one module or subtree."""

    name: Name
    """The name of the module or of the subtree's topmost module."""
    modules: int
    """How many modules with weights the subtree contains; 1 for a single module."""
    drift: float
    """The drift of the main output if only this module or subtree is cast, in the unit of the `AttributionReport`. It is infinity
    if the output is not finite.
    """
    share: float | None
    """`drift` divided by the drift of the whole recipe on the same inputs, or None if the quotient is not finite."""
    local_sqnr_db: float | None = None
    """The SQNR in dB of the module's own output if only this module is cast. Its inputs then equal the reference's, so the SQNR
    shows the error of this module alone. None for a subtree, and for a module without an output to compare.
    """


@dataclass(frozen=True, slots=True)
class AttributionReport:
    """The modules in which a recipe's drift arises."""

    model: str
    rules: tuple[str, ...]
    unit: str
    """The unit of all drifts in this report, such as nats per token."""
    whole: float
    """The drift of the main output if the whole recipe is applied, over the inputs of this report."""
    together: float
    """The sum of `drift` over all contributions. It may differ from `whole`, because drifts can cancel or reinforce each other."""
    positions: int
    """How many positions of the main output (its rows, such as tokens) were compared."""
    passes: int
    """How many forward passes were run. Some were partial: they began at the first module that the cast affects."""
    seconds: float
    causes: tuple[Contribution, ...]
    """The drift that each module or subtree causes alone, the largest first."""


@dataclass(frozen=True, slots=True)
class PartialAttribution:
    """The causes of a drift as far as they are known while modules and subtrees are still being measured one by one."""

    report: AttributionReport
    """The report on the modules and subtrees that have been measured. Only these count in `together`, `passes` and `seconds`."""
    done: int
    """How many modules and subtrees have been measured."""
    total: int
    """How many modules and subtrees are to be measured in all."""


@dataclass(frozen=True, slots=True)
class NonFiniteDiagnosis:
    """Where values stop being finite in the candidate, and which rules prevent this.

    `module`, `operation` and `dtype` describe the first operation that computes a non-finite value from finite ones.
    """

    kind: Literal["weight", "activation", "reference", "unknown"]
    """The cause. "weight": the values of `weights` exceed the range of `dtype`. "activation": the result of the operation, or an
    activation that was cast for it, exceeds the range of `dtype`. "reference": the float32 reference itself is not finite.
    "unknown": none of these.
    """
    first_module: Name
    """The first module, in the order of execution, whose output is finite in the reference but not in the candidate."""
    module: Name
    """The module whose code runs the operation; "" for the model itself."""
    operation: str
    dtype: str
    limit: float | None
    """The largest finite value of `dtype`."""
    weights: tuple[Name, ...]
    largest: float | None
    """The largest finite magnitude among the inputs of the operation or, if `kind` is "weight", among the stored values of the
    weights.
    """
    largest_reference: float | None
    """The largest magnitude of the operation's result in the reference."""
    remedy: tuple[str, ...]
    """Rules to append to the recipe's rules. In a trial run with them, the output was finite wherever the reference is finite.
    Empty if no such rules were found.
    """
    reason: str = ""
    """If `remedy` is empty: why no rules were found. Otherwise a note that the reference itself has values that are not finite, or
    "".
    """
    constant: float | None = None
    """If the cause is a constant in the model's code that the dtype can't represent: the constant's value. Examples are a mask that
    becomes infinite and an epsilon that becomes 0. Otherwise None.
    """
    before: OutputDrift | None = None
    """The drift of the main output without the rules in `remedy`."""
    after: OutputDrift | None = None
    """The drift of the main output with the rules in `remedy`, over the same inputs as `before`. None if `remedy` is empty."""


@dataclass(frozen=True, slots=True)
class LossRemedy:
    """Suggested rules for tensors with values that the recipe's casts make infinite or zero. The user adds them after the recipe's
    own rules.
    """

    rules: tuple[str, ...]
    tensors: tuple[Name, ...]
    """The tensors that the suggested rules match. Each gets another dtype, usually a wider one such as bfloat16, in which none of
    its values becomes infinite or zero. If there is no such dtype with fewer bits than the stored dtype, the tensor gets its stored
    dtype.
    """
    planned_bytes_before: int
    """The bytes of the whole model in its planned dtypes, without the suggested rules."""
    planned_bytes: int
    """The bytes of the whole model in its planned dtypes, with the suggested rules."""
    before: OutputDrift | None = None
    """The drift of the main output without the suggested rules, or None if the model can't be run."""
    after: OutputDrift | None = None
    """The drift of the main output with the suggested rules, over the same inputs as `before`. None if it was not measured."""
    reason: str = ""
    """Why the effect of the suggested rules was not measured, for example because the model can't be run."""

    @property
    def improves(self) -> bool:
        """Whether the suggested rules were tried and reduce the drift of the main output."""
        return self.before is not None and self.after is not None and drifts_less(self.after, self.before)
