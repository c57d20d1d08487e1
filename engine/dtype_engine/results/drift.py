"""What the engine measures, as plain data: what panes show and `--json` prints.

Bytes are bytes, times are seconds, KL is nats per position, SQNR is decibels. A figure that was not or could
not be measured is None.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from dtype_engine.results.losses import ValueLoss


@dataclass(frozen=True, slots=True)
class OutputDrift:
    """How far the main output is from the reference, over all its elements, computed in float64.

    For an output over classes or tokens the second block compares distributions, position by position;
    means carry their standard error (`_se`); percentiles (`_p999` is the 99.9th, `_p01` the 0.1th) need 100 positions. The
    third needs next tokens. `nonfinite` counts what is not finite here but is in the reference; `nonfinite_reference` what
    is NaN or +infinity in the reference itself (-infinity is how a mask is written).
    """

    elements: int
    mean_abs: float
    max_abs: float
    rel_l2: float
    sqnr_db: float
    cosine: float
    nonfinite: int

    positions: int | None = None
    kl_mean: float | None = None
    kl_mean_se: float | None = None
    kl_median: float | None = None
    kl_p95: float | None = None
    kl_p99: float | None = None
    kl_p999: float | None = None
    kl_max: float | None = None
    top1_agreement: float | None = None
    top1_agreement_se: float | None = None

    scored_tokens: int | None = None
    dp_mean: float | None = None
    dp_mean_se: float | None = None
    dp_rms: float | None = None
    dp_p1: float | None = None
    dp_p99: float | None = None
    perplexity_reference: float | None = None
    perplexity_candidate: float | None = None
    log_ratio: float | None = None
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
    perplexity_ratio: float | None = None
    perplexity_ratio_se: float | None = None
    perplexity_difference: float | None = None
    perplexity_difference_se: float | None = None

    nonfinite_reference: int = 0


@dataclass(frozen=True, slots=True)
class ModuleDrift:
    """The same for one module's output. `nonfinite` counts elements that are not finite here but were there.

    `sqnr_db` is infinity where nothing differs, and None where outputs can't be compared element by element (an
    expert that was given other tokens).
    """

    name: str
    sqnr_db: float | None
    max_abs: float
    nonfinite: int


@dataclass(frozen=True, slots=True)
class ImplicitCastStats:
    """Implicit casts of one forward pass: in `module`, `operation` was given `source` and computed in `target`.

    `elements` over all `count` of them. `torch_raises`: plain torch refuses this operation with mixed dtypes, so code that
    runs without this program's rules fails here.
    """

    module: str
    operation: str
    source: str
    target: str
    elements: int
    count: int
    torch_raises: bool


@dataclass(frozen=True, slots=True)
class WeightError:
    """What casting one tensor to `dtype` and back does to its values.

    Errors are of the value that comes back against the stored one, over all elements. Counts are of elements: overflowed
    (finite, then infinite), saturated (infinite, then the dtype's largest), underflowed (not zero, then zero), subnormal in the
    dtype (there with fewer bits), nonfinite (before the cast). `sqnr_db`: infinity where nothing differs, minus infinity where
    values became infinite, None where a figure would read as praise: some values were not finite, which have no error, or some
    became zero that are so small beside the others that it is above 200 dB.
    """

    name: str
    stored: str
    dtype: str
    elements: int
    mean_abs: float
    max_abs: float
    rel_l2: float
    sqnr_db: float | None
    overflowed: int
    saturated: int
    underflowed: int
    subnormal: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class SkippedTensor:
    """A tensor that no cast is tried on, and why."""

    name: str
    dtype: str
    why: str


@dataclass(frozen=True, slots=True)
class ExponentHistogram:
    """How many of a tensor's values have which exponent, floor(log2 |x|): pairs (exponent, count), smallest first."""

    name: str
    counts: tuple[tuple[int, int], ...]
    zeros: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class WeightStats:
    """All there is to know of one tensor's values: their exponents, and the round-trip error in several dtypes."""

    exponents: ExponentHistogram
    errors: tuple[WeightError, ...]


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Memory, in bytes, by the definitions of the help.

    stored: tensors in the checkpoint; planned: the same under the recipe; resident: the live module's tensors by
    device, non-persistent buffers included. rss is the process's resident set: its anonymous part, and the part that is
    mapped from the checkpoint's files, which the system can take back. peak_rss is since the last operation began.
    """

    stored_bytes: int | None = None
    planned_bytes: int | None = None
    resident_bytes: int | None = None
    resident_by_device: tuple[tuple[str, int], ...] = ()
    rss_bytes: int | None = None
    anonymous_bytes: int | None = None
    mapped_bytes: int | None = None
    peak_rss_bytes: int | None = None
    device_allocated_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall time of the forward passes over all inputs, what is done for the comparison left out.

    `reused` says that the candidate's unchanged beginning was not run again, so its time is not that of a whole pass.
    """

    reference: float | None = None
    candidate: float | None = None
    reused: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that a model wrote: their ids, what each adds to the text, and the seconds that all of it took."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    seconds: float

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt, continued greedily by the reference and by the candidate."""

    prompt: str
    reference: Written
    candidate: Written

    @property
    def same_tokens(self) -> int:
        """How many tokens from the start are the same."""
        pairs = zip(self.reference.ids, self.candidate.ids, strict=False)
        return next(
            (place for place, (one, other) in enumerate(pairs) if one != other),
            min(len(self.reference.ids), len(self.candidate.ids)),
        )

    @property
    def differs(self) -> bool:
        """Whether the two part at all."""
        return self.reference.ids != self.candidate.ids


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """Wall time of forward passes over all inputs: `what` is "reference", "as stored" or "candidate", in `dtypes`.

    `seconds` is the median of `repeats` after one to warm up. `under_rules`: this mix does not run in plain torch, so the
    time holds what the rules for mixed dtypes take.
    """

    what: str
    dtypes: str
    seconds: float
    fastest: float
    slowest: float
    repeats: int
    tokens_per_second: float | None
    under_rules: bool


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """How fast the model is in its dtypes, on this machine, over these inputs."""

    model: str
    device: str
    threads: int
    rules: tuple[str, ...]
    inputs: str
    rows: tuple[SpeedRow, ...]
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DriftReport:
    """One measurement: a recipe against the reference. `lost`: the weights whose cast loses values."""

    model: str
    device: str
    reference: str
    rules: tuple[str, ...]
    settings: str
    inputs: str
    output_name: str
    output: OutputDrift
    modules: tuple[ModuleDrift, ...]
    memory: MemoryStats
    seconds: Seconds
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightScore:
    """What one weight in one dtype, everything else as in the reference, adds to the drift.

    `bytes` are those of the weight in that dtype, scales included. `score` is in the report's unit, infinity where the
    output is not finite; `error` is its standard error, over sequences (over draws while there is but one).
    """

    name: str
    dtype: str
    bytes: int
    score: float
    error: float | None = None


NATS = "nats per token"
NATS_PER_EXAMPLE = "nats per example"
SQUARED = "relative squared error"


def unit_for(distribution: bool, dimensions: int) -> str:
    """The unit of the one figure that drift is ranked by.

    distribution: whether the main output holds logits of one; dimensions: how many the output has, 3 or more where every token
    has a distribution of its own.
    """
    if not distribution:
        return SQUARED
    return NATS if dimensions > 2 else NATS_PER_EXAMPLE


@dataclass(frozen=True, slots=True)
class ScanReport:
    """How much every castable weight matters, in every dtype asked for.

    unit: `NATS` (or `NATS_PER_EXAMPLE`) where the output is a distribution, else `SQUARED`: of the main output, the square
    of relative L2. exact: each was measured alone, else estimated from `draws` backward passes a sequence. `sequences` of
    `all_sequences` have gone by. A weight that stays at least as wide as the reference costs nothing.
    """

    model: str
    device: str
    reference: str
    inputs: str
    unit: str
    exact: bool
    draws: int
    sequences: int
    all_sequences: int
    dtypes: tuple[str, ...]
    forward_seconds: float
    scan_seconds: float
    weights: tuple[WeightScore, ...]
    notices: tuple[str, ...] = ()

    def scores(self) -> dict[tuple[str, str], float]:
        """Scores by (weight, dtype)."""
        return {(weight.name, weight.dtype): weight.score for weight in self.weights}


@dataclass(frozen=True, slots=True)
class Prediction:
    """The drift that a scan predicts for a recipe: the sum of its weights' own scores. Errors need not add up."""

    value: float
    unit: str
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A point of the Pareto front: planned bytes, and predicted drift."""

    bytes: int
    predicted: float


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The recipe that was found, as rules, with its planned bytes and predicted drift, and the whole Pareto front; `lost`: the
    weights whose cast by it loses values.
    """

    model: str
    unit: str
    rules: tuple[str, ...]
    stored_bytes: int
    planned_bytes: int
    predicted: float
    front: tuple[FrontPoint, ...]
    measured: float | None = None
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] = ()


def as_json(value: Any) -> Any:
    """Dataclasses as dictionaries and figures that JSON has no word for (infinity, NaN) as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
