"""Results that explain a drift: the noise floor, the modules that cause it, and values that are not finite or that casts lose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core.text import Name, brief
from dtype_engine.core.units import human_bytes, plural
from dtype_engine.results.drift import OutputDrift, drifts_less

REACH_OF_FLOOR = 1e-3
"""The largest relative L2 error with which a drift may be noise. Summing in another order changes a float32 output by about 1e-7 of
its size; the limit is higher because the noise grows in deep models.
"""
REACH_IN_16_BITS = 0.1
"""The same for the drift of a candidate that computes in 16 bits, in which another kernel changes an output by about 1e-2."""
_KERNELS = 2.0
"""Up to this many times what another kernel changes, a drift is said to be within it: both runs differ from exact sums."""


def near_floor(output: OutputDrift) -> bool:
    """Return whether the drift may be noise, so that the noise floor should be measured."""
    return 0 < (output.rel_l2 or 0.0) <= REACH_OF_FLOOR


def near_kernels(output: OutputDrift) -> bool:
    """Return whether the drift of a candidate that computes in 16 bits may be what another kernel changes."""
    return 0 < (output.rel_l2 or 0.0) <= REACH_IN_16_BITS


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The noise floor: the drift of a model from itself when the same arithmetic runs in another order. It is that of the reference
    in float32, or that of the candidate in its own dtypes.
    """

    ways: tuple[str, ...]
    """The repeated runs, such as "eager attention". Each metric is the worst of all runs. Without runs, the floor is unknown."""
    positions: int
    """How many positions of the main output (its rows, such as tokens) were compared."""
    sqnr_db: float
    max_abs: float
    rel_l2: float
    kl_mean: float | None = None
    top1_agreement: float | None = None
    margin: float | None = None
    """The largest change, at a position, of the difference between the log-probabilities of the run's two most likely classes, in
    nats. Another order of arithmetic may swap two classes that are this close.
    """

    def covers(self, output: OutputDrift) -> bool:
        """Return whether a drift is not above the noise floor, by mean KL if both have a mean KL, otherwise by SQNR."""
        if not self.ways or not output.is_finite or output.max_abs == 0:
            return False
        if output.kl_mean is not None and self.kl_mean is not None:
            return output.kl_mean <= self.kl_mean
        return output.sqnr_db is not None and output.sqnr_db >= self.sqnr_db

    def explains(self, output: OutputDrift) -> bool:
        """Return whether a drift is less than twice this floor of the candidate, by mean KL if both have one, otherwise by SQNR."""
        if not self.ways or not output.is_finite or output.max_abs == 0:
            return False
        if output.kl_mean is not None and self.kl_mean is not None:
            return output.kl_mean < _KERNELS * self.kl_mean
        return output.sqnr_db is not None and output.sqnr_db > self.sqnr_db - 10 * math.log10(_KERNELS)


@dataclass(frozen=True, slots=True)
class Contribution:
    """The drift of the main output if the recipe casts only the weights in one module or subtree."""

    name: Name
    """The name of the module, or of the subtree's topmost module."""
    modules: int
    """How many modules with weights the subtree contains; 1 for a single module."""
    drift: float
    """The drift in the unit of the `AttributionReport`. Infinity if the output is not finite."""
    share: float | None
    """`drift` divided by the drift of the whole recipe on the same inputs, or None if the quotient is not finite."""
    local_sqnr_db: float | None = None
    """The SQNR in dB of the module's own output if only this module is cast. None for a subtree, or if it can't be compared."""


@dataclass(frozen=True, slots=True)
class AttributionReport:
    """The modules in which a recipe's drift arises."""

    model: str
    rules: tuple[str, ...]
    unit: str
    """The unit of all drifts in this report, such as nats per token."""
    whole: float
    """The drift of the main output under the whole recipe, over the same inputs."""
    together: float
    """The sum of all contributions. It may differ from `whole`, because drifts can cancel or reinforce each other."""
    positions: int
    passes: int
    """How many forward passes were run. Some were partial: they began at the first module that the cast affects."""
    seconds: float
    causes: tuple[Contribution, ...]
    """The contributions, largest first."""

    def __repr__(self) -> str:
        most = "".join(f"{each.name} {each.drift:.4e} alone" for each in self.causes[:1])
        return brief(
            f"AttributionReport: {self.model}, {plural(len(self.causes), 'cause')}",
            ("rules", ", ".join(self.rules) or "none: as stored"),
            ("drift", f"{self.whole:.4e} {self.unit}; the sum of all causes {self.together:.4e}"),
            ("most", most),
        )


@dataclass(frozen=True, slots=True)
class PartialAttribution:
    """The causes of a drift while `done` of `total` modules and subtrees have been measured."""

    report: AttributionReport
    """The report on the measured modules and subtrees. Its `together`, `passes` and `seconds` are of these alone."""
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class NonFiniteDiagnosis:
    """Where values stop being finite in the candidate, and which rules prevent this.

    `module`, `operation` and `dtype` describe the first operation that computes a non-finite value from finite ones.
    """

    kind: Literal["weight", "activation", "reference", "unknown"]
    """What exceeds the range of `dtype`: the values of `weights`, or an activation, which is the operation's result or an input
    cast for the operation. "reference": the float32 reference itself is not finite. "unknown": none of these.
    """
    first_module: Name
    """The first module that runs whose output is finite in the reference but not in the candidate."""
    module: Name
    """The module whose code runs the operation; "" for the model itself."""
    operation: str
    dtype: str
    limit: float | None
    """The largest finite value of `dtype`."""
    weights: tuple[Name, ...]
    largest: float | None
    """The largest finite magnitude of the operation's inputs or, if `kind` is "weight", of the weights' stored values."""
    largest_reference: float | None
    """The largest magnitude of the operation's result in the reference."""
    remedy: tuple[str, ...]
    """Rules to append to the recipe's rules. With them, the output was finite wherever the reference is. () if none were found."""
    reason: str = ""
    """Why no rules were found. If there are rules: a sentence if the reference has values that are not finite, otherwise ""."""
    constant: float | None = None
    """The constant in the model's code that is the cause: it becomes infinite (in a mask) or zero (an epsilon). Otherwise None."""
    before: OutputDrift | None = None
    """The drift of the main output without the rules in `remedy`."""
    after: OutputDrift | None = None
    """The drift of the main output with the rules in `remedy`, over the same inputs as `before`. None if `remedy` is empty."""

    def __repr__(self) -> str:
        return brief(
            f"NonFiniteDiagnosis: {self.kind}, first in the output of {self.first_module or 'the model'}",
            ("where", f"{self.operation} in {self.dtype}, in {self.module or 'the model'}"),
            ("weights", ", ".join(self.weights)),
            ("remedy", ", ".join(self.remedy)),
            ("reason", self.reason),
        )


@dataclass(frozen=True, slots=True)
class LossRemedy:
    """Rules to append to a recipe whose casts make values infinite or zero. They give the affected tensors other dtypes."""

    rules: tuple[str, ...]
    tensors: tuple[Name, ...]
    """The tensors that the rules match. Each tensor gets a dtype in which none of its values becomes infinite or zero: its stored
    dtype if no dtype with fewer bits holds all values.
    """
    planned_bytes_before: int
    """The bytes of the whole model without these rules."""
    planned_bytes: int
    """The bytes of the whole model with these rules."""
    before: OutputDrift | None = None
    """The drift of the main output without these rules, or None if the model can't be run."""
    after: OutputDrift | None = None
    """The drift of the main output with these rules, over the same inputs. None if it was not measured."""
    reason: str = ""
    """Why the drift with the rules was not measured, or ""."""

    def __repr__(self) -> str:
        drifts = [each.max_abs for each in (self.before, self.after) if each is not None]
        return brief(
            f"LossRemedy: {plural(len(self.rules), 'rule')} for {plural(len(self.tensors), 'tensor')}",
            ("rules", ", ".join(self.rules)),
            ("memory", f"planned {human_bytes(self.planned_bytes_before)} → {human_bytes(self.planned_bytes)}"),
            ("drift", f"max |Δ| {' → '.join(f'{each:.4e}' for each in drifts)}" if drifts else ""),
            ("reason", self.reason),
        )

    @property
    def improves(self) -> bool:
        """Whether the rules were tried and reduce the drift of the main output."""
        return self.before is not None and self.after is not None and drifts_less(self.after, self.before)
