"""What is told about a drift beside its figures: its floor, its causes, and where values stop being finite. Never imports
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtype_engine.results.drift import OutputDrift, drifts_less

REACH_OF_FLOOR = 1e-3
"""Relative L2 error. Float32 sums in another order move an output by some 1e-7 of itself: this leaves room for deep models."""


def near_floor(output: OutputDrift) -> bool:
    """Whether a reading is so small that it may be under its floor, which is worth measuring then; no drift at all needs none."""
    return 0 < output.rel_l2 <= REACH_OF_FLOOR


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The drift of the reference against itself: the same float32 arithmetic in another order.

    `ways`: how it was run again ("eager attention", "batch of two"); each figure is the worst of them. `positions`: of how
    many outputs (rows of the main output). Empty `ways`: this model can't be run in another way, and nothing is known.
    """

    ways: tuple[str, ...]
    positions: int
    sqnr_db: float
    max_abs: float
    rel_l2: float
    kl_mean: float | None = None
    top1_agreement: float | None = None

    def covers(self, output: OutputDrift) -> bool:
        """Whether a reading is no larger than the floor, so that it says nothing: by mean KL, else by SQNR."""
        if not self.ways or output.nonfinite or output.max_abs == 0:
            return False
        if output.kl_mean is not None and self.kl_mean is not None:
            return output.kl_mean <= self.kl_mean
        return output.sqnr_db >= self.sqnr_db


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one part of the model adds to the output's drift: `modules` modules with weights, at or below `name`.

    drift: of the output when this part alone runs as cast, everything else as the reference (the report's unit; infinity
    where the output is not finite). share: of the whole recipe's drift over the same inputs; None where that is not finite.
    local_sqnr_db: of this part's own output then, on the reference's inputs, so its own error and none that it was given;
    None where it is not one module with an output to compare.
    """

    name: str
    modules: int
    drift: float
    share: float | None
    local_sqnr_db: float | None = None


@dataclass(frozen=True, slots=True)
class AttributionReport:
    """Where a recipe's drift arises, the largest contribution first.

    whole: the drift of the whole recipe over these inputs, in `unit`. together: the sum of the contributions; errors need not
    add up. positions: rows of output that were compared. passes: how many forward passes this took (parts of passes,
    where the beginning was not run again).
    """

    model: str
    rules: tuple[str, ...]
    unit: str
    whole: float
    together: float
    positions: int
    passes: int
    seconds: float
    causes: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class NonFiniteDiagnosis:
    """Where values stop being finite, and what would mend it.

    kind: "weight" (values of `weights` are beyond the dtype), "activation" (an operation's result, or what is cast on its way
    into one, is), "reference" (the float32 reference is not finite itself), or "unknown".
    module, operation, dtype: of the first operation that gives something that is not finite from finite values; the module is
    "" for the model's own code. first_module: the first module whose output is not finite where the reference's is.
    largest: the largest finite magnitude that went into it (of a weight as stored); largest_reference: the largest that it
    gives in the reference. limit: the dtype's largest value.
    remedy: a rule that, put in force, makes the output finite, tried out, and `reason` then says where the reference is not; None
    where none does, and `reason` says why.
    """

    kind: Literal["weight", "activation", "reference", "unknown"]
    first_module: str
    module: str
    operation: str
    dtype: str
    limit: float | None
    weights: tuple[str, ...]
    largest: float | None
    largest_reference: float | None
    remedy: str | None
    reason: str = ""
    constant: float | None = None
    """A number of the model's code that the dtype does not hold: a mask's, infinite in it, or an epsilon, which is zero."""
    before: OutputDrift | None = None
    """The drift of the main output without the remedy."""
    after: OutputDrift | None = None
    """The drift with it, over the same inputs; None where there is no remedy."""


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
