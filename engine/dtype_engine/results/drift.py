"""How far outputs are from the reference, as plain data: what panes show and `--json` prints.

Times are seconds, KL is nats per position, SQNR is decibels. A figure that was not or could not be measured is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.units import plural
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.memory import MemoryStats


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDrift:
    """How far the main output is from the reference, over all its elements, computed in float64.

    c is the candidate's output, r the reference's. `_se` is the standard error of a mean over positions; percentiles (`_p999` is
    the 99.9th, `_p01` the 0.1th) need 100 positions. How each is computed, and by whose definition:
    `runtime/numerics/compare/metrics.py`.
    """

    elements: int
    """All of the output."""
    mean_abs: float
    """Mean |c - r|, in the output's own unit."""
    max_abs: float
    """Largest |c - r|, in the output's own unit."""
    rel_l2: float
    """‖c - r‖ / ‖r‖."""
    sqnr_db: float
    """20 log10(‖r‖ / ‖c - r‖), decibels; infinity where nothing differs."""
    cosine: float
    """r·c / (‖r‖ ‖c‖)."""
    nonfinite: int
    """Elements that are not finite in c and not the same in r."""

    # An output over classes or tokens: its distributions p (reference) and q (candidate), position by position.
    positions: int | None = None
    kl_mean: float | None = None
    """KL(p ‖ q) = Σ p log(p / q), nats per position; so are all `kl_`."""
    kl_mean_se: float | None = None
    kl_median: float | None = None
    kl_p95: float | None = None
    kl_p99: float | None = None
    kl_p999: float | None = None
    kl_max: float | None = None
    top1_agreement: float | None = None
    """Share of positions (0 to 1) with the same most likely class."""
    top1_agreement_se: float | None = None

    # Next tokens that are known.
    scored_tokens: int | None = None
    dp_mean: float | None = None
    """q - p of the next token, from -1 to 1; so are all `dp_`."""
    dp_mean_se: float | None = None
    dp_rms: float | None = None
    dp_p1: float | None = None
    dp_p99: float | None = None
    perplexity_reference: float | None = None
    """exp of the mean of -log p of the next token; `_candidate`: of -log q."""
    perplexity_candidate: float | None = None
    log_ratio: float | None = None
    """Mean of log p - log q of the next token, nats: log(perplexity_candidate / perplexity_reference)."""
    log_ratio_se: float | None = None

    # The rest of what `llama-perplexity --kl-divergence` prints.
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
    """Pearson's, of -log p and -log q over the next tokens."""
    perplexity_ratio: float | None = None
    """perplexity_candidate / perplexity_reference."""
    perplexity_ratio_se: float | None = None
    perplexity_difference: float | None = None
    """perplexity_candidate - perplexity_reference."""
    perplexity_difference_se: float | None = None

    nonfinite_reference: int = 0
    """Elements that are NaN or +infinity in r itself (-infinity is how a mask is written)."""

    @property
    def kl_tail(self) -> dict[str, float]:
        """The percentiles of KL over positions that are shown, in nats, by what they are called; those that are known."""
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
    """The same for one module's output, over all its elements in the sequences in which modules were compared
    (`DriftReport.modules_sequences`).
    """

    name: str
    sqnr_db: float | None
    """Infinity where nothing differs; None where outputs can't be compared element by element (an expert that was given other
    tokens)."""
    max_abs: float
    nonfinite: int
    """Elements that are not finite here and not the same in the reference."""


def sqnr_gain(one: ModuleDrift, other: ModuleDrift) -> float | None:
    """How many dB more SQNR the first has; None where that is no number."""
    if one.sqnr_db is None or other.sqnr_db is None:
        return None
    gain = one.sqnr_db - other.sqnr_db
    return gain if math.isfinite(gain) else None


def worst_modules(modules: Iterable[ModuleDrift]) -> list[ModuleDrift]:
    """Those whose outputs differ from the reference: by how many values are not finite, then the lowest SQNR first.

    A module that gives on what one inside it has made, as an MLP does of its last projection, is left out.
    """
    differing = [each for each in modules if each.nonfinite or each.sqnr_db not in (None, math.inf)]
    alike: dict[tuple[object, ...], list[str]] = {}
    for each in differing:
        alike.setdefault((each.sqnr_db, each.max_abs, each.nonfinite), []).append(each.name)
    own = [
        each
        for each in differing
        if not any(
            name.startswith(f"{each.name}.") for name in alike[each.sqnr_db, each.max_abs, each.nonfinite] if each.name
        )
    ]
    return sorted(own, key=lambda each: (-each.nonfinite, -math.inf if each.sqnr_db is None else each.sqnr_db))


@dataclass(frozen=True, slots=True)
class ImplicitCastStats:
    """Implicit casts of one forward pass: in `module`, `operation` was given `source` and computed in `target`.

    `elements` over all `count` of them. `torch_raises`: plain torch refuses this operation with mixed dtypes, so code that
    runs without this program's rules fails here. A storage dtype as `target`: an activation was rounded to it, as a runtime does
    (the setting `quantize_activations`).
    """

    module: str
    operation: str
    source: str
    target: str
    elements: int
    count: int
    torch_raises: bool

    @property
    def in_torch(self) -> str:
        """What plain torch does in its place, in a word; `rounded` where it is the setting that rounds."""
        if self.target in dtypes.STORAGE_DTYPES:
            return "rounded"
        return "raises" if self.torch_raises else "promotes"


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall time of the forward passes over all inputs, what is done for the comparison left out.

    `reused` says that the candidate's unchanged beginning was not run again, so its time is not that of a whole pass.
    """

    reference: float | None = None
    candidate: float | None = None
    reused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of the inputs figures are over: `done` of `total` sequences, `positions` rows of the main output.

    rel_l2_error, kl_error: how far the relative L2 error and the mean KL over all sequences may be from those so far: one standard
    error, over the figure itself (`runtime/measure/sampling_error.py`). 0.0 once all were run; None where that can't be known.
    of_tokens: positions are tokens of a text. left_out: positions that are padding by a mask, and are in no figure.
    """

    done: int
    total: int
    positions: int
    of_tokens: bool = False
    rel_l2_error: float | None = 0.0
    kl_error: float | None = None
    left_out: int = 0

    @property
    def whole(self) -> bool:
        """Whether all of the inputs were run."""
        return self.done >= self.total

    @property
    def error(self) -> float | None:
        """Of the mean KL where there is one, else of the relative L2 error."""
        return self.rel_l2_error if self.kl_error is None else self.kl_error

    @property
    def left_out_text(self) -> str:
        """`; 6 padding positions left out`; nothing where there are none."""
        return f"; {plural(self.left_out, 'padding position')} left out" if self.left_out else ""

    def is_within(self, precision: float | None) -> bool:
        """Whether the figure is known to a relative standard error of `precision`; None: only all of the inputs are enough."""
        return self.whole or (precision is not None and self.error is not None and self.error <= precision)

    def rest_for(self, precision: float | None) -> float:
        """About which share of the sequences that are left has to be run for the figure to be `is_within` it: the square of the
        error of n of N sequences goes as (N - n) / n.
        """
        left = self.total - self.done
        if precision is None or not self.error or left <= 0:
            return 1.0
        square = self.error**2 * self.done / left
        enough = square * self.total / (square + precision**2)
        return min(1.0, max(1 / left, (enough - self.done) / left))


@dataclass(frozen=True, slots=True)
class PartialDrift:
    """The main output's drift over the sequences that were run so far, of a measurement under way or one that was stopped."""

    output: OutputDrift
    extent: Extent


@dataclass(frozen=True, slots=True)
class DriftReport:
    """One measurement: a recipe against the reference."""

    model: str
    device: str
    reference: str
    rules: tuple[str, ...]
    settings: str
    inputs: str
    output_name: str
    output: OutputDrift
    """Over all sequences that were run."""
    modules: tuple[ModuleDrift, ...]
    """In the order in which they were first called."""
    memory: MemoryStats
    seconds: Seconds
    sequences: Extent
    """How much of the inputs `output` is over."""
    modules_sequences: int
    """How many sequences the figures of `modules` are over: the first that was run and as many more as are a quarter of the inputs,
    or all."""
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] = ()
    """The weights whose cast loses values."""
    activations: Literal["none", "weights"] = "none"
    """The setting `quantize_activations`."""

    @property
    def weights_only(self) -> bool:
        """Whether a runtime would quantise activations too, and here they were not."""
        quantised = any(dtypes.quantizes_activations(rule.rpartition("=")[2]) for rule in self.rules)
        return quantised and self.activations == "none"

    @property
    def inputs_run(self) -> str:
        """The inputs in words, how many were run where that is not all of them, and how much of them is padding."""
        run = self.sequences
        words = self.inputs if run.whole else f"{self.inputs}; {run.done:,} of {run.total:,} were run"
        return words + run.left_out_text


NATS = "nats per token"
NATS_PER_EXAMPLE = "nats per example"
NATS_PER_PIXEL = "nats per pixel"
SQUARED = "relative squared error"


def unit_for(classes_dim: int | None, dimensions: int) -> str:
    """The unit of the one figure that drift is ranked by.

    classes_dim: which of the main output's dimensions, from 0, holds the logits of a distribution; None for no distribution. Every
    token has a distribution where the last of three or more does, and every pixel where another one does.
    """
    if classes_dim is None:
        return SQUARED
    if dimensions <= 2:
        return NATS_PER_EXAMPLE
    return NATS if classes_dim == dimensions - 1 else NATS_PER_PIXEL


def drifts_less(one: OutputDrift, other: OutputDrift) -> bool:
    """Whether an output drifts less than another: by values that are not finite, then by mean KL, else by relative L2."""
    if one.nonfinite != other.nonfinite:
        return one.nonfinite < other.nonfinite
    if one.kl_mean is not None and other.kl_mean is not None:
        return one.kl_mean < other.kl_mean
    return one.rel_l2 < other.rel_l2
