"""The results of a drift measurement: how far outputs are from the reference's, as plain data that the app shows and `--json`
prints.

Times are in seconds, KL in nats per position, SQNR in decibels. A metric that was not measured is None.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.text import Name
from dtype_engine.core.units import plural
from dtype_engine.results.coverage import Coverage
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.memory import MemoryStats
from dtype_engine.results.metrics import MetricChange
from dtype_engine.results.pictures import PicturePair


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDrift:
    """How far the candidate's main output is from the reference's, over all elements, computed in float64.

    c is the candidate's output and r the reference's. q is the candidate's distribution over classes at a position, and p the
    reference's. `_se` is the standard error of a mean over positions. Percentiles (`_p999` is the 99.9th, `_p01` the 0.1th) need
    100 positions. `runtime/numerics/compare/metrics.py` says how each metric is computed, and by whose definition.
    """

    elements: int
    """How many elements the output has."""
    mean_abs: float
    """The mean absolute difference between the candidate's and the reference's output, in the output's own unit."""
    max_abs: float
    """The largest absolute difference between the candidate's and the reference's output, in the output's own unit."""
    rel_l2: float
    """The relative L2 error, ‖c - r‖ / ‖r‖. c is the candidate's output, r the reference's."""
    sqnr_db: float
    """20 log10(‖r‖ / ‖c - r‖) in decibels: the size of the reference r over that of the error c - r. Infinity if c equals r."""
    cosine: float
    """The cosine similarity r·c / (‖r‖ ‖c‖) of the reference's output r and the candidate's output c."""
    nonfinite: int
    """The number of elements of the candidate's output that are not finite and differ from the reference's."""

    # The fields below are set where the output holds a distribution at each position: p is the reference's, q the candidate's.
    positions: int | None = None
    kl_mean: float | None = None
    """The mean of KL(p ‖ q) = Σ p log(p / q) over positions; p is the reference's distribution, q the candidate's. All `kl_` fields
    are in nats per position.
    """
    kl_mean_se: float | None = None
    kl_median: float | None = None
    kl_p95: float | None = None
    kl_p99: float | None = None
    kl_p999: float | None = None
    kl_max: float | None = None
    top1_agreement: float | None = None
    """The share of positions (0 to 1) at which the candidate and the reference have the same most likely class."""
    top1_agreement_se: float | None = None

    # The fields below are set where the next token of the text is known.
    scored_tokens: int | None = None
    """At how many positions the actual next token is known, so that its probability can be compared."""
    dp_mean: float | None = None
    """The mean of q - p: the probability of the actual next token under the candidate, minus that under the reference. All `dp_`
    fields are about this difference, which is between -1 and 1.
    """
    dp_mean_se: float | None = None
    dp_rms: float | None = None
    dp_p1: float | None = None
    dp_p99: float | None = None
    perplexity_reference: float | None = None
    """The reference's perplexity: exp of the mean of -log p, where p is its probability of the actual next token."""
    perplexity_candidate: float | None = None
    """The candidate's perplexity: exp of the mean of -log q, where q is its probability of the actual next token."""
    log_ratio: float | None = None
    """ln(perplexity_candidate / perplexity_reference): the mean log-probability of the next token, reference minus candidate."""
    log_ratio_se: float | None = None

    # The other figures that `llama-perplexity --kl-divergence` prints.
    kl_p90: float | None = None
    kl_p10: float | None = None
    kl_p5: float | None = None
    kl_p1: float | None = None
    kl_p01: float | None = None
    kl_min: float | None = None
    dp_rms_se: float | None = None
    dp_max: float | None = None
    dp_p999: float | None = None
    dp_p95: float | None = None
    dp_p90: float | None = None
    dp_p75: float | None = None
    dp_median: float | None = None
    dp_p25: float | None = None
    dp_p10: float | None = None
    dp_p5: float | None = None
    dp_p01: float | None = None
    dp_min: float | None = None
    perplexity_reference_se: float | None = None
    perplexity_candidate_se: float | None = None
    perplexity_correlation: float | None = None
    """Pearson's correlation, over positions, of the candidate's loss with the reference's. The loss is -log of the probability of
    the actual next token.
    """
    perplexity_ratio: float | None = None
    """perplexity_candidate / perplexity_reference."""
    perplexity_ratio_se: float | None = None
    perplexity_difference: float | None = None
    """perplexity_candidate - perplexity_reference."""
    perplexity_difference_se: float | None = None

    # The fields below are set where the output is a picture or a video (`runtime/numerics/compare/pictures.py`).
    psnr_db: float | None = None
    """If the output is a picture: the peak signal-to-noise ratio of the candidate's picture in dB; infinity if both pictures are
    equal.
    """
    ssim: float | None = None
    """If the output is a picture: the mean structural similarity (SSIM) of the two pictures, at most 1. None if they are smaller
    than SSIM's window of 11 x 11 pixels.
    """

    nonfinite_reference: int = 0
    """The number of elements of the reference's output that are NaN or +infinity. -infinity is not counted, since masks have it."""

    @property
    def kl_tail(self) -> dict[str, float]:
        """The KL percentiles that reports show, in nats, by label: "median", "p95", ..., "max". Percentiles that were not measured
        are left out.
        """
        tail = {
            "median": self.kl_median,
            "p95": self.kl_p95,
            "p99": self.kl_p99,
            "p99.9": self.kl_p999,
            "max": self.kl_max,
        }
        return {name: value for name, value in tail.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ModuleDrift:
    """How far one module's output is from the reference, over all its elements in the sequences in which modules were compared
    (`DriftReport.modules_sequences`).
    """

    name: Name
    sqnr_db: float | None
    """The SQNR of the module's output in decibels: infinity if it equals the reference's. None if the two can't be compared element
    by element, for example because an expert got other tokens than in the reference.
    """
    max_abs: float
    """The largest absolute difference from the reference's output, in the output's own unit."""
    nonfinite: int
    """The number of elements of the module's output that are not finite and differ from the reference's."""


def sqnr_gain(one: ModuleDrift, other: ModuleDrift) -> float | None:
    """Return how many dB the SQNR of `one` is above the SQNR of `other`, or None if either is not finite."""
    if one.sqnr_db is None or other.sqnr_db is None:
        return None
    gain = one.sqnr_db - other.sqnr_db
    return gain if math.isfinite(gain) else None


def _has_inner(module: str, names: Sequence[str]) -> bool:
    place = bisect_left(names, f"{module}.")
    return place < len(names) and names[place].startswith(f"{module}.")


def worst_modules(modules: Iterable[ModuleDrift]) -> list[ModuleDrift]:
    """Return the modules whose outputs differ from the reference, ordered by the number of non-finite values, then by SQNR, the
    worst first.

    A module that merely returns the output of a module inside it is left out. For example, an MLP returns the output of its last
    projection.
    """
    differing = [each for each in modules if each.nonfinite or each.sqnr_db not in (None, math.inf)]
    alike: dict[tuple[object, ...], list[str]] = {}
    for each in sorted(differing, key=lambda each: each.name):
        alike.setdefault((each.sqnr_db, each.max_abs, each.nonfinite), []).append(each.name)
    own = [
        each
        for each in differing
        if not (each.name and _has_inner(each.name, alike[each.sqnr_db, each.max_abs, each.nonfinite]))
    ]
    return sorted(own, key=lambda each: (-each.nonfinite, -math.inf if each.sqnr_db is None else each.sqnr_db))


@dataclass(frozen=True, slots=True)
class ImplicitCastStats:
    """The implicit casts of one kind in a forward pass: `operation` in `module` received values of dtype `source` and computed in
    dtype `target`.
    """

    module: Name
    operation: str
    source: str
    target: str
    """The dtype of the computation, or the format to which the setting `quantize_activations` rounded an activation."""
    elements: int
    """How many elements were cast, over all `count` casts."""
    count: int
    torch_raises: bool
    """Whether plain torch refuses this operation on mixed dtypes. It then works only because this program converts the inputs."""

    @property
    def in_torch(self) -> str:
        """One word for what plain torch does with these dtypes: it `promotes` or `raises`. For an activation that was rounded
        because of the setting `quantize_activations`, the word is `rounded`.
        """
        if self.target in dtypes.STORAGE_DTYPES:
            return "rounded"
        return "raises" if self.torch_raises else "promotes"


@dataclass(frozen=True, slots=True)
class Seconds:
    """The wall times of the reference's and the candidate's forward passes over all inputs, without the time for comparing
    outputs.
    """

    reference: float | None = None
    candidate: float | None = None
    reused: bool = False
    """Whether the candidate's passes skipped modules whose outputs were known from earlier passes. If so, `candidate` is less than
    the time of whole passes.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How many of the inputs were run for a measurement, and how precisely its metrics estimate those of all inputs.

    The precision is given by the relative error, the standard error of a metric divided by the metric
    (`runtime/measure/sampling_error.py`). It is 0.0 once all inputs were run, and None if it is unknown.
    """

    done: int
    """The number of sequences that were run."""
    total: int
    """The number of sequences in the inputs."""
    positions: int
    """The number of positions of the main output (its rows, such as tokens) that were compared."""
    of_tokens: bool = False
    """Whether the positions that `positions` counts are tokens of a text."""
    rel_l2_error: float | None = 0.0
    kl_error: float | None = None
    left_out: int = 0
    """The number of positions that a mask marks as padding. No metric includes them."""

    @property
    def whole(self) -> bool:
        """Whether all inputs were run."""
        return self.done >= self.total

    @property
    def error(self) -> float | None:
        """The relative standard error of the mean KL or, without KL, of the L2 error. It decides when a measurement may stop."""
        return self.rel_l2_error if self.kl_error is None else self.kl_error

    @property
    def left_out_text(self) -> str:
        """A text about padding to append to a report, such as `; 6 padding positions left out`, or "" if no positions are left
        out.
        """
        return f"; {plural(self.left_out, 'padding position')} left out" if self.left_out else ""

    def is_within(self, precision: float | None) -> bool:
        """Return whether the metrics are precise enough: all inputs were run, or `error` is at most `precision`. If `precision` is
        None, all inputs must have been run.
        """
        return self.whole or (precision is not None and self.error is not None and self.error <= precision)

    def rest_for(self, precision: float | None) -> float:
        """Return an estimate of the share (0 to 1) of the remaining sequences that must be run until `error` is at most
        `precision`. The estimate assumes that the square of the error after n of N sequences is proportional to (N - n) / n.
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
    """The drift of each module's output, in the order in which the modules were first called."""
    memory: MemoryStats
    seconds: Seconds
    sequences: Extent
    """How many sequences and positions of the inputs were run for `output`, and of how many."""
    modules_sequences: int
    """On how many sequences the outputs of `modules` were compared: all, or about a sixth of the inputs, which includes the first
    sequence.
    """
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] | None = ()
    """The weights with values that their cast made infinite or zero, or clipped, with the numbers of such values. None if they were
    not counted.
    """
    activations: Literal["none", "weights"] = "none"
    """The setting `quantize_activations` with which the candidate was run."""
    coverage: Coverage | None = None
    """How many tensors of the model its files have, or None for a model without a checkpoint."""
    metrics: tuple[MetricChange, ...] = ()
    """The user's own metrics, such as an accuracy, on the reference and on the candidate."""
    weights_only: bool = False
    """Whether activations stayed unquantized in this measurement although runtimes quantize them for weights in the recipe's
    formats. Rules for KV caches don't count.
    """
    pictures: tuple[PicturePair, ...] = ()
    """The pictures of both models for the first inputs, made smaller if they are large. Empty unless the model makes pictures."""

    @property
    def inputs_run(self) -> str:
        """A description of the inputs, with the number of sequences that were run if not all were, and the number of positions that
        were left out as padding, if any.
        """
        run = self.sequences
        words = self.inputs if run.whole else f"{self.inputs}; {run.done:,} of {run.total:,} were run"
        return words + run.left_out_text


NATS = "nats per token"
NATS_PER_EXAMPLE = "nats per example"
NATS_PER_PIXEL = "nats per pixel"
SQUARED = "relative squared error"


def unit_for(classes_dim: int | None, dimensions: int) -> str:
    """Return the unit of the drift by which recipes are ranked, such as nats per token.

    classes_dim: the dimension of the main output along which logits lie, or None if the output is no distribution. dimensions: how
    many dimensions the output has. If it has three or more, there is a distribution for each token if logits lie in the last one,
    otherwise for each pixel.
    """
    if classes_dim is None:
        return SQUARED
    if dimensions <= 2:
        return NATS_PER_EXAMPLE
    return NATS if classes_dim == dimensions - 1 else NATS_PER_PIXEL


def drifts_less(one: OutputDrift, other: OutputDrift) -> bool:
    """Return whether the output `one` drifts less than the output `other`: it has fewer non-finite values or, if the numbers are
    equal, a smaller mean KL. If KL was not measured, the relative L2 error decides.
    """
    if one.nonfinite != other.nonfinite:
        return one.nonfinite < other.nonfinite
    if one.kl_mean is not None and other.kl_mean is not None:
        return one.kl_mean < other.kl_mean
    return one.rel_l2 < other.rel_l2
