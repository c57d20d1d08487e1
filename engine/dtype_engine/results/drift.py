"""The results of a drift measurement: how far outputs are from the reference's.

Times are in seconds, KL in nats per position, SQNR in decibels. A metric that was not measured is None.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtype_engine.core import dtypes
from dtype_engine.core.llama_types import INPUT_BLOCKS
from dtype_engine.core.number_ranges import Amount, Count
from dtype_engine.core.text import Name
from dtype_engine.core.units import decibels, plural
from dtype_engine.results.coverage import Coverage
from dtype_engine.results.draft_head import DraftAcceptance
from dtype_engine.results.groups import Groups, PositionGroup
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.memory import MemoryStats
from dtype_engine.results.metrics import MetricChange
from dtype_engine.results.pictures import PicturePair

NAMES = (
    "elements", "mean_abs", "max_abs", "rel_l2", "sqnr_db", "cosine", "nonfinite", "positions", "kl_mean", "kl_mean_se",
    "kl_median", "kl_p95", "kl_p99", "kl_p999", "kl_max", "top1_agreement", "top1_agreement_se", "scored_tokens", "dp_mean",
    "dp_mean_se", "dp_rms", "dp_p1", "dp_p99", "perplexity_reference", "perplexity_candidate", "log_ratio", "log_ratio_se",
    "kl_p90", "kl_p10", "kl_p5", "kl_p1", "kl_p01", "kl_min", "dp_rms_se", "dp_max", "dp_p999", "dp_p95", "dp_p90", "dp_p75",
    "dp_median", "dp_p25", "dp_p10", "dp_p5", "dp_p01", "dp_min", "perplexity_reference_se", "perplexity_candidate_se",
    "perplexity_correlation", "perplexity_ratio", "perplexity_ratio_se", "perplexity_difference", "perplexity_difference_se",
    "psnr_db", "ssim", "nonfinite_reference", "nonfinite_candidate", "acceptance", "acceptance_se",
    "recall_at_10", "recall_at_10_se",
)  # fmt: skip
"""The names of what is measured of an output, in the order of JSON.

`kl_` is about KL(p ‖ q) in nats per position, with p the reference's distribution and q the candidate's. `dp_` is about q - p of
the actual next token, from -1 to 1. `acceptance` is the mean of Σ min(p, q), from 0 to 1, if a setting asks for it.
`recall_at_10` is the share of an input's ten nearest others that stay among them, for models with one vector per input. `_se` is
the standard error of a mean over positions, or of the recall over inputs. Percentiles (`_p999` is the 99.9th, `_p01` the 0.1th)
need 100 positions.
`runtime/numerics/compare/metrics.py` says how each is computed, and by whose definition.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDrift:
    """How far the candidate's main output is from the reference's, over all elements, computed in float64.

    Each of `NAMES` is an attribute, which is None if it was not measured: those of elements, if only log-probabilities of one of
    the two outputs are known. c is the candidate's output and r the reference's.
    """

    elements: Count
    mean_abs: float | None = None
    """The mean of |c - r|, in the output's own unit."""
    max_abs: float | None = None
    """The largest |c - r|, in the output's own unit."""
    rel_l2: float | None = None
    """The relative L2 error, ‖c - r‖ / ‖r‖."""
    sqnr_db: float | None = None
    """20 log10(‖r‖ / ‖c - r‖) in decibels. Infinity if c equals r."""
    cosine: float | None = None
    """The cosine similarity r·c / (‖r‖ ‖c‖)."""
    nonfinite: Count
    """The number of elements of c that are not finite and differ from r's, which is 0 if both are NaN everywhere."""
    nonfinite_reference: Count = 0
    """The number of elements of r that are NaN or +infinity. -infinity is not counted, since masks have it."""
    nonfinite_candidate: Count = 0
    """The number of elements of c that are not finite, without those where both are -infinity."""
    positions: Count | None = None
    """At how many positions the output has a distribution, or None if the output has no distributions."""
    kl_mean: float | None = None
    """The mean of KL(p ‖ q) = Σ p log(p / q) over positions, in nats."""
    kl_mean_se: float | None = None
    top1_agreement: float | None = None
    """The share of positions (0 to 1) at which the candidate and the reference have the same most likely class."""
    scored_tokens: Count | None = None
    """At how many positions the actual next token is known."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The metrics that have no field, by name."""
    groups: Groups = field(default_factory=dict)
    """The drift in groups of positions. Empty if the output has no distributions, or NaN or +infinity in the reference."""

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite in the reference and in the candidate, apart from -infinity, which masks have."""
        return not (self.nonfinite or self.nonfinite_reference)

    @property
    def nonfinite_text(self) -> str:
        """How many elements of which output are not finite: `48 of 256 in the candidate, 0 in the reference`, or `0`."""
        if self.is_finite:
            return "0"
        count = max(self.nonfinite, self.nonfinite_candidate)  # a session that was saved earlier lacks the latter
        return f"{count:,} of {self.elements:,} in the candidate, {self.nonfinite_reference:,} in the reference"

    @classmethod
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments to construct an `OutputDrift` from metrics by their names in JSON, and from `groups`. A metric that
        is None is left out.
        """
        known = {name: value for name, value in values.items() if value is not None}
        own = {name: known.pop(name) for name in cls.__slots__ if name in known}
        return own | {"values": known}

    def __getattr__(self, name: str) -> float | None:
        """Return the entry of `values` with this name, or None if it was not measured."""
        if name not in NAMES and (name == "values" or name not in self.values):
            raise AttributeError(f"a drift has no figure {name!r}")
        return self.values.get(name)

    def group(self, name: str) -> PositionGroup | None:
        """Return the drift in a group of positions, such as `confidence:0.95-1`, or None if it has no positions."""
        grouping, _, group = name.partition(":")
        return self.groups.get(grouping, {}).get(group)

    def by_name(self) -> dict[str, float | None]:
        """Return all metrics of the output, by name. A metric that was not measured is None."""
        return {name: getattr(self, name) for name in (*NAMES, *self.values)}


@dataclass(frozen=True, slots=True)
class ModuleDrift:
    """How far one module's output is from the reference, over the sequences on which modules were compared."""

    name: Name
    sqnr_db: float | None
    """The SQNR in dB; infinity for equal outputs. None if they can't be compared, for example if an expert got other tokens."""
    max_abs: float
    """The largest absolute difference, in the output's own unit."""
    nonfinite: Count
    """The number of elements that are not finite and differ from the reference's."""
    nonfinite_reference: Count = 0
    """The number of elements that are NaN or +infinity in the reference."""

    @property
    def is_finite(self) -> bool:
        """As for an `OutputDrift`."""
        return not (self.nonfinite or self.nonfinite_reference)

    @property
    def sqnr_text(self) -> str:
        """The SQNR as text, or `not finite` unless all elements are."""
        return decibels(self.sqnr_db if self.is_finite else math.nan)

    @property
    def nonfinite_text(self) -> str:
        """The counts as text, such as `48` or `0 and 18,000 in the reference`."""
        itself = f" and {self.nonfinite_reference:,} in the reference" if self.nonfinite_reference else ""
        return f"{self.nonfinite:,}{itself}"


def sqnr_gain(one: ModuleDrift, other: ModuleDrift) -> float | None:
    """Return how many dB the SQNR of `one` is above the SQNR of `other`, or None if either is not finite."""
    if one.sqnr_db is None or other.sqnr_db is None:
        return None
    gain = one.sqnr_db - other.sqnr_db
    return gain if math.isfinite(gain) else None


def _has_inner(module: str, names: Sequence[str]) -> bool:
    place = bisect_left(names, f"{module}.")
    return place < len(names) and names[place].startswith(f"{module}.")


def _figures(drift: ModuleDrift) -> tuple[object, ...]:
    return drift.sqnr_db, drift.max_abs, drift.nonfinite, drift.nonfinite_reference


def worst_modules(modules: Iterable[ModuleDrift], output: OutputDrift | None = None) -> list[ModuleDrift]:
    """Return the modules whose outputs differ from the reference or are not finite in it, the worst first. They are sorted by how
    many values are not finite in the candidate alone, then by how many in the reference, then by SQNR.

    output: the main output. If it is not finite, modules that are finite are left out, unless all are.

    A module that merely returns the output of a module inside it, as an MLP returns its last projection's output, is left out.
    """
    differing = [each for each in modules if not each.is_finite or each.sqnr_db not in (None, math.inf)]
    if output is not None and not output.is_finite:
        differing = [each for each in differing if not each.is_finite] or differing
    alike: dict[tuple[object, ...], list[str]] = {}
    for each in sorted(differing, key=lambda each: each.name):
        alike.setdefault(_figures(each), []).append(each.name)
    own = [each for each in differing if not (each.name and _has_inner(each.name, alike[_figures(each)]))]
    return sorted(
        own,
        key=lambda each: (
            -each.nonfinite, -each.nonfinite_reference, -math.inf if each.sqnr_db is None else each.sqnr_db,
        ),
    )  # fmt: skip


def first_different(modules: Iterable[ModuleDrift]) -> str | None:
    """Return the name of the first module, in the order of their calls, whose output differs from the reference's, or None."""
    differing = (each.name for each in modules if not each.is_finite or each.max_abs > 0)
    return next(differing, None)


@dataclass(frozen=True, slots=True)
class ImplicitCastStats:
    """Implicit casts of one kind in a forward pass: `operation` in `module` got values in dtype `source` and computed in
    `target`.
    """

    module: Name
    operation: str
    source: str
    target: str
    """The dtype of the computation, or the format to which `quantize_activations` rounded an activation."""
    elements: int
    """How many elements were cast, over all `count` casts."""
    count: int
    torch_raises: bool
    """Whether plain torch refuses this operation on mixed dtypes, so that it only works because this program converts inputs."""

    @property
    def in_torch(self) -> str:
        """What plain torch does with these dtypes: `promotes` or `raises`. Or `rounded`, if `quantize_activations` rounded the
        values.
        """
        if self.target in dtypes.STORAGE_DTYPES or self.target in INPUT_BLOCKS:
            return "rounded"
        return "raises" if self.torch_raises else "promotes"


@dataclass(frozen=True, slots=True)
class Seconds:
    """The wall times of forward passes over all inputs, without the time for comparing outputs."""

    reference: Amount | None = None
    candidate: Amount | None = None
    reused: bool = False
    """Whether the candidate's passes skipped modules whose outputs were known from earlier passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How many of the inputs were run for a measurement, and how precisely its metrics estimate the metrics over all inputs.

    Errors are relative: the standard error of a metric divided by the metric (`runtime/measure/sampling_error.py`). They are 0.0
    once all inputs were run, and None if unknown.
    """

    done: Count
    """How many sequences were run."""
    total: Count
    """How many sequences the inputs have."""
    positions: Count
    """How many positions of the main output (its rows, such as tokens) were compared."""
    of_tokens: bool = False
    """Whether positions are tokens of a text."""
    rel_l2_error: float | None = 0.0
    kl_error: float | None = None
    left_out: Count = 0
    """How many positions a mask marks as padding. No metric includes them."""

    @property
    def whole(self) -> bool:
        """Whether all inputs were run."""
        return self.done >= self.total

    @property
    def error(self) -> float | None:
        """The relative error of the mean KL or, without KL, of the L2 error; None if unknown. It decides when a measurement may
        stop.
        """
        return self.rel_l2_error if self.kl_error is None else self.kl_error

    @property
    def left_out_text(self) -> str:
        """Words about padding to append, such as `; 6 padding positions left out`, or ""."""
        return f"; {plural(self.left_out, 'padding position')} left out" if self.left_out else ""

    def is_within(self, precision: float | None) -> bool:
        """Return whether all inputs were run, or `error` is at most `precision`."""
        return self.whole or (precision is not None and self.error is not None and self.error <= precision)

    def rest_for(self, precision: float | None) -> float:
        """Estimate which share (0 to 1) of the remaining sequences must be run until `error` is at most `precision`. It assumes
        that the square of the error after n of N sequences is proportional to (N - n) / n.
        """
        left = self.total - self.done
        if precision is None or not self.error or left <= 0:
            return 1.0
        square = self.error**2 * self.done / left
        enough = square * self.total / (square + precision**2)
        return min(1.0, max(1 / left, (enough - self.done) / left))


@dataclass(frozen=True, slots=True)
class PartialDrift:
    """The drift of the main output over the sequences that a running or stopped measurement has run."""

    output: OutputDrift
    extent: Extent


@dataclass(frozen=True, slots=True)
class DriftReport:
    """The result of one drift measurement: how far the model under a recipe is from the reference."""

    model: str
    device: str
    reference: str
    rules: tuple[str, ...]
    settings: str
    inputs: str
    output_name: str
    output: OutputDrift
    """The drift of the main output over all sequences that were run."""
    modules: tuple[ModuleDrift, ...]
    """The drift of each module, in the order in which the modules were first called."""
    memory: MemoryStats
    seconds: Seconds
    sequences: Extent
    """The sequences that were run for `output`."""
    modules_sequences: int
    """On how many sequences modules were compared: all, or about a sixth of the inputs, the first sequence among them."""
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] | None = ()
    """The weights of which the cast made values infinite or zero, or clipped them. None if they were not counted."""
    coverage: Coverage | None = None
    """Which of the model's tensors are in its files. None for a model without a checkpoint."""
    metrics: tuple[MetricChange, ...] = ()
    """The user's own metrics, such as an accuracy."""
    weights_only: bool = False
    """Whether activations stayed unquantized although runtimes quantize them for weights in the recipe's formats."""
    pictures: tuple[PicturePair, ...] = ()
    """The pictures that both models make of the first inputs, reduced if they are large. Empty unless the model makes pictures."""
    draft: DraftAcceptance | None = None
    """How many drafts of the checkpoint's own draft head are accepted. None if there is no head, or if this was not measured."""

    @property
    def inputs_run(self) -> str:
        """A description of the inputs, with the number of sequences that were run if not all were, and of left-out padding."""
        run = self.sequences
        words = self.inputs if run.whole else f"{self.inputs}; {run.done:,} of {run.total:,} were run"
        return words + run.left_out_text


NATS = "nats per token"
NATS_PER_EXAMPLE = "nats per example"
NATS_PER_PIXEL = "nats per pixel"
SQUARED = "relative squared error"


def unit_for(classes_dim: int | None, dimensions: int) -> str:
    """Return the unit of the drift by which recipes are ranked.

    classes_dim: the dimension of the main output along which logits lie, or None if it is no distribution. dimensions: how many
    dimensions the output has. With three or more, it has a distribution for each token if logits lie in the last one, otherwise for
    each pixel.
    """
    if classes_dim is None:
        return SQUARED
    if dimensions <= 2:
        return NATS_PER_EXAMPLE
    return NATS if classes_dim == dimensions - 1 else NATS_PER_PIXEL


def drifts_less(one: OutputDrift, other: OutputDrift) -> bool:
    """Return whether `one` has less drift than `other`: by non-finite values, then by mean KL or, without KL, by relative L2."""
    if one.nonfinite != other.nonfinite:
        return one.nonfinite < other.nonfinite
    if one.kl_mean is not None and other.kl_mean is not None:
        return one.kl_mean < other.kl_mean
    return (one.rel_l2 or 0.0) < (other.rel_l2 or 0.0)
