"""The scan: how much every weight matters in every dtype, from a few backward passes.

KL divergence is, to second order, half the square of the change of the logits weighed by their Fisher information
F = diag(p) - ppᵀ, p the reference's softmax. For each sequence, probes v = (diag(√p) - p√pᵀ) ξ are drawn at the logits, ξ random
(Rademacher) signs, so that E[vvᵀ] = F, and carried back: g is the gradient of v·logits with respect to a weighted operation's
output. Its product with the local error Δ of running just that operation in a candidate dtype, summed over the sequence and
over all uses of the weight, is squared: ½ E[(Σ g·Δ)²] is the KL divergence. (Labels drawn from p give the same mean, since
their log-likelihood has the same Fisher information; where p is nearly certain it hangs on the few unlikely ones.) Where the
output is no distribution, v is drawn from a Gaussian, and E[(Σ g·Δ)²] over the output's energy is the relative squared error.

The method is that of Fisher (Gauss-Newton) sensitivities for mixed precision, as in HAWQ-V2 (Dong et al., 2020), with
Hutchinson's random signs (1990) carried back as probes; where HAWQ has the mean trace of a layer's Hessian times the squared
error of its weights, here the error of the operation's output itself is multiplied, so that errors that cancel do.

Sequences go by one at a time; after each there is an estimate with its standard error. Local errors are computed inside the
backward pass, one operation's at a time, and nothing of them is kept but their products with the gradients. Two things that
no local error has come on top: tokens that a router sends elsewhere (`routing`), and dtypes that the model's code reads
(`dtype_dependent_weights`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dtype_engine.checkpoint import FileIdentity
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.dtypes import quantizes_activations
from dtype_engine.core.errors import UserError
from dtype_engine.core.memory_share import memory_budget
from dtype_engine.core.options import RunSettings
from dtype_engine.core.shard import WHOLE, Shard
from dtype_engine.recipe import tensor_bytes
from dtype_engine.results.scan import ScanReport, WeightScore
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel, Weight
from dtype_engine.runtime.modes.reference import reference_name
from dtype_engine.runtime.numerics.quantize import torch_dtype
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.scan import saved as scan_file
from dtype_engine.runtime.scan.local_errors import LocalErrors
from dtype_engine.runtime.scan.saved import Fingerprint
from dtype_engine.runtime.scan.scores import SequenceScores, combine_scores
from dtype_engine.runtime.scan.sequence import SequenceScan
from dtype_engine.search.sensitivity import is_lossless

DEFAULT_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
FEWEST_DRAWS, SAMPLES = 4, 24
TIMED = 4
"""A plain forward pass is timed on one in so many sequences; on the others it is taken to be as long for its size."""

OnStep = Callable[[str, int, int | None], None]
OnEstimate = Callable[[ScanReport], None]


def default_draws(sequences: int) -> int:
    """Backward passes a sequence: enough for `SAMPLES` over all of them, an error of about 15 % for six dtypes."""
    return max(FEWEST_DRAWS, math.ceil(SAMPLES / max(1, sequences)))


def scanned_dtypes(weight: Weight, targets: Sequence[str]) -> tuple[str, ...]:
    """The dtypes in which a weight is scored: those asked for, and its own, since the reference computes in float32."""
    return tuple(dict.fromkeys((weight.info.dtype, *targets)))


@dataclass(frozen=True, slots=True)
class ScannedSequence:
    """What the sequence `index` of a scan gave. Seconds: of one plain forward pass, and of scanning it."""

    index: int
    scores: SequenceScores
    unit: str
    forward_seconds: float
    scan_seconds: float


@dataclass
class Scan:
    """A scan under way, or finished. `run` goes on from where it is; `measure` and `add` are its steps, for whoever lets
    sequences go by elsewhere.

    draws: backward passes a sequence, None for `default_draws`. budget: bytes for gradients and cast weights; by default a
    quarter of the memory that was free. save: a file that is written after every sequence, and read at the start. on_unsaved: told
    why it can't be written; without, that ends the scan. done: by the index of the sequence. shard: the share of the sequences
    that is to go by here.
    """

    model: LiveModel
    inputs: Inputs
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    settings: RunSettings = field(default_factory=RunSettings)
    draws: int | None = None
    budget: int = field(default_factory=memory_budget)
    save: Path | None = None
    done: dict[int, SequenceScores] = field(default_factory=dict)
    unit: str = ""
    forward_seconds: float = 0.0
    scan_seconds: float = 0.0
    shard: Shard = WHOLE
    on_unsaved: Callable[[str], None] | None = None
    _seen: FileIdentity | None = None

    def __post_init__(self) -> None:
        self.backward_passes = self.draws or default_draws(len(self.inputs.batches))
        self.fingerprint = Fingerprint.of(self.model, self.inputs, self.dtypes, self.settings)
        self.wanted = {
            name: scanned_dtypes(weight, self.dtypes)
            for name, weight in self.model.weights.items()
            if weight.info.castable and weight.info.persistent
        }
        self._costly = {
            name: tuple(dtype for dtype in targets if not self._free(name, dtype))
            for name, targets in self.wanted.items()
        }
        compute = torch_dtype(self.settings.compute)
        self._local = LocalErrors(
            self.model.weights,
            compute,
            self.model.device,
            self.budget // 2,
            self.settings.quantize_activations == "weights",
        )
        self._pace: float | None = None
        if self.save is not None:
            self.keep_in(self.save)

    def keep_in(self, path: Path, on_unsaved: Callable[[str], None] | None = None) -> None:
        """Save to a file from now on, and go on from what is there. Raises UserError, and nothing is changed, for another scan."""
        if path.exists():
            saved = scan_file.read(path, self.fingerprint, self.draws)
            self.done, self.unit, self.backward_passes = saved.done, saved.unit, saved.draws
            self.forward_seconds, self.scan_seconds = saved.forward_seconds, saved.scan_seconds
        self.save, self.on_unsaved = path, on_unsaved

    def _free(self, name: str, dtype: str) -> bool:
        """Whether a cast costs nothing: no bit of the weight, and no rounding of what it is multiplied with."""
        rounds = self.settings.quantize_activations == "weights" and quantizes_activations(dtype)
        return not rounds and is_lossless(self.model.weights[name].info.dtype, dtype)

    @property
    def parts(self) -> int:
        """How many sequences there are."""
        return len(self.inputs.batches)

    @property
    def finished(self) -> bool:
        """Whether every sequence has gone by."""
        return len(self.done) == self.parts

    @property
    def private_bytes(self) -> int:
        """What a process holds beside the mapped files: the largest weight in each dtype; graphs have a budget of their own."""
        return max((4 * weight.info.numel for weight in self.model.weights.values()), default=0) * (
            1 + len(self.dtypes)
        )

    def pending(self) -> list[int]:
        """The indexes of the sequences of its share that have not gone by."""
        return [index for index in self.shard.of(range(self.parts)) if index not in self.done]

    def run(
        self,
        on_progress: OnStep = lambda step, done, total: None,
        on_estimate: OnEstimate = lambda report: None,
        cancelled: IsCancelled = never,
    ) -> ScanReport:
        """Let the remaining sequences of its share go by. `on_progress("scan", done, total)` counts operations,
        `on_estimate(report)` has the report after every sequence.

        Raises NoForward, KernelError, and Cancelled: what is done is kept, and `run` goes on after it.
        """
        report: ScanReport | None = None
        count = len(self.shard.of(range(self.parts)))
        for index in self.pending():
            before = count - len(self.pending())

            def measured(done: int, total: int, before: int = before) -> None:
                on_progress("scan", before * total + done, total * count)

            self.add(self.measure(index, measured, cancelled))
            report = self.report()
            on_estimate(report)
        return report or self.report()

    def measure(
        self,
        index: int,
        on_measured: Callable[[int, int], None] = lambda done, total: None,
        cancelled: IsCancelled = never,
    ) -> ScannedSequence:
        """Let one sequence go by, whichever did before. `on_measured(done, total)` counts operations. Raises as `run`."""
        with ForwardRunner(self.model, self.settings.of_weights(), cancelled, watch=False) as runner:
            batch = runner.reference_batch(self.inputs.batches[index])
            started = time.perf_counter()
            seconds = None
            if self._pace is None or index % TIMED == 0:
                seconds = runner.reference(partial(batch.run, self.model.module)).seconds
            one = SequenceScan(
                self.model,
                self.wanted,
                self._costly,
                self.backward_passes,
                self.budget,
                self._local,
                on_measured,
                cancelled,
            )
            scores = one.run(batch, index, self.parts)
            if self._pace is None or seconds is not None:
                self._pace = (seconds or 0.0) / one.elements
            return ScannedSequence(index, scores, one.unit, self._pace * one.elements, time.perf_counter() - started)

    def add(self, part: ScannedSequence) -> None:
        """Take what a sequence gave, and save it."""
        self.done[part.index] = part.scores
        self.unit = part.unit
        self.forward_seconds += part.forward_seconds
        self.scan_seconds += part.scan_seconds
        if self.save is None:
            return
        try:
            self.write(self.save)
        except UserError as error:
            if self.on_unsaved is None:
                raise
            self.save = None
            self.on_unsaved(str(error))

    def report(self) -> ScanReport:
        """The estimate so far."""
        if not self.done:
            raise UserError("the scan has no estimate yet: no sequence has gone by")
        in_order = [self.done[index] for index in sorted(self.done)]  # sums of floats depend on it
        scores = combine_scores(in_order, self.wanted, self.backward_passes, self._free)
        return ScanReport(
            model=self.model.title,
            device=str(self.model.device),
            reference=reference_name(self.model),
            inputs=self.inputs.description,
            unit=self.unit,
            exact=False,
            draws=self.backward_passes,
            sequences=len(self.done),
            all_sequences=self.parts,
            dtypes=self.dtypes,
            forward_seconds=self.forward_seconds,
            scan_seconds=self.scan_seconds,
            weights=tuple(
                WeightScore(name, dtype, tensor_bytes(self.model.weights[name].info, dtype), *scores[name, dtype])
                for name, targets in self.wanted.items()
                for dtype in targets
            ),
            notices=self.model.notices,
            activations=self.settings.quantize_activations,
        )

    def write(self, path: Path) -> None:
        """Save what was done. Raises UserError."""
        self._seen = scan_file.write_joined(
            path,
            scan_file.SavedScan(
                self.fingerprint, self.backward_passes, self.unit, self.forward_seconds, self.scan_seconds, self.parts,
                self.done, shard=self.shard,
            ),
            self._seen,
        )  # fmt: skip
