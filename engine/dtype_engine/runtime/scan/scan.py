"""The scan: estimates, from a few backward passes, how far the output drifts if each weight alone is cast to each dtype.

To second order, KL divergence is half the squared change of the logits, weighed by their Fisher information F = diag(p) - ppᵀ,
where p is the reference's softmax. For each sequence, probes v = (diag(√p) - p√pᵀ) ξ are drawn at the logits, where ξ are random
(Rademacher) signs, so that E[vvᵀ] = F. Backpropagation gives g, the gradient of v·logits with respect to the output of an operation
that uses a weight. Δ is the local error: the change of that output if only this operation uses the cast weight. With Σ over the
sequence and over all uses of the weight, ½ E[(Σ g·Δ)²] is the KL divergence. If the output is not a distribution, v is Gaussian,
and E[(Σ g·Δ)²] divided by the output's energy is the relative squared error.

The method uses Fisher (Gauss-Newton) sensitivities for mixed precision, as HAWQ-V2 does (Dong et al., 2020), and Hutchinson's
random signs (1990) as probes. HAWQ multiplies the mean trace of a layer's Hessian by the squared error of its weights. Here the
gradient is multiplied by the error of the operation's output, so that errors which cancel in the output cancel in the estimate.

Sequences are scanned one at a time; each improves the estimate and its standard error. Local errors are computed during the
backward pass, one operation at a time, and only their products with the gradients are kept. Two effects that local errors do not
include are added: tokens that are routed to other experts (`routing`), and dtypes that the model's code reads. Weights whose effect
has no gradient are measured, each in a separate pass (`measured_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import STORED
from dtype_engine.results.scan import MOST_DRAWS, ScanReport
from dtype_engine.runtime.scan import saved as scan_file
from dtype_engine.runtime.scan.savable_scan import OnEstimate, OnStep, SavableScan
from dtype_engine.runtime.scan.saved import SavedScan
from dtype_engine.runtime.scan.scanned_roundings import RoundingGains, SharedRoundings
from dtype_engine.runtime.scan.scores import SequenceScores, combine_scores
from dtype_engine.runtime.scan.sequence_scans import ScannedSequence, SequenceScans

FEWEST_DRAWS, SAMPLES = 4, 24


def default_draws(sequences: int) -> int:
    """Return the number of backward passes per sequence: 24 divided by the number of sequences, but at least 4. With 24 samples
    in all, the standard error of a score is about 15 % if six dtypes are scanned, and larger for fewer dtypes (see `scores.py`).
    """
    return max(FEWEST_DRAWS, math.ceil(SAMPLES / max(1, sequences)))


@dataclass(repr=False)
class Scan(SavableScan):
    """Estimates a score for each weight and dtype: the drift of the model's output if only this weight is cast. `run` scans all
    sequences; callers that scan them in other processes call `measure` and `add` for each.
    """

    draws: int | None = None
    """The number of backward passes per sequence; None: `default_draws`."""
    budget: int = 0
    """The maximum number of bytes for gradients, cast weights and copies of weights in an autograd graph; 0: `cache_budget`."""
    done: dict[int, SequenceScores] = field(default_factory=dict)
    """The results of the finished sequences, by the index of the sequence."""
    roundings: RoundingGains = field(default_factory=dict)
    """What the roundings did to weights, as soon as a sequence is finished."""

    def __post_init__(self) -> None:
        if self.model.reference == STORED:
            raise UserError(
                "a scan estimates drift from float32 arithmetic, and can't see what 16-bit arithmetic adds: measure each cast with "
                "--exact, or leave out --reference stored"
            )
        self.backward_passes = self.draws or default_draws(len(self.inputs.batches))
        if not 1 <= self.backward_passes <= MOST_DRAWS:
            raise UserError(f"draws: {self.backward_passes} is out of range; there may be 1 to {MOST_DRAWS:,}")
        super().__post_init__()
        self.budget = self.budget or self.model.cache_budget
        self._scans = SequenceScans(self.model, self.inputs, self.settings, self.budget, self.wanted)
        if self.save is not None:
            self.keep_in(self.save)

    def keep_in(self, path: Path, on_unsaved: Callable[[str], None] | None = None) -> None:
        """Continue from the results in the file `path`, if it exists, and save the results in it from now on. on_unsaved: as in
        `SavableScan`. Raises UserError, with nothing changed, if the file holds a different scan.
        """
        if path.exists():
            saved = scan_file.read(path, self.fingerprint, self.draws)
            self.done, self.unit, self.backward_passes = saved.done, saved.unit, saved.draws
            self.roundings = saved.roundings
            self.forward_seconds, self.scan_seconds = saved.forward_seconds, saved.scan_seconds
        self.save, self.on_unsaved = path, on_unsaved

    @property
    def parts(self) -> int:
        """The number of sequences in the whole scan."""
        return len(self.inputs.batches)

    @property
    def finished(self) -> bool:
        return len(self.done) == self.parts

    @property
    def private_bytes(self) -> int:
        """How many bytes a process needs in addition to mapped files and autograd graphs: the largest weight in each dtype."""
        return max((4 * weight.info.numel for weight in self.model.weights.values()), default=0) * (
            1 + len(self.dtypes)
        )

    def pending(self) -> list[int]:
        """Return the indexes of the sequences that this process still has to scan."""
        return [index for index in self.shard.of(range(self.parts)) if index not in self.done]

    def run(
        self, on_progress: OnStep = ignore, on_estimate: OnEstimate = ignore, cancelled: IsCancelled = never
    ) -> ScanReport:
        """Scan the remaining sequences of this process, and return the report of all finished ones. `on_progress("scan", done,
        total)` is called with the numbers of finished operations and of all operations, and `on_estimate(report)` with intermediate
        reports. If dtypes with a rounding are scanned, `on_progress("rounding", done, total)` comes before, with the numbers of
        calibration runs and casts.
        Raises NoForward, KernelError and Cancelled; the next `run` scans what is left.
        """
        report: ScanReport | None = None
        count = len(self.shard.of(range(self.parts)))
        while pending := self.pending():
            group, in_file = self._scans.groups.next(pending, self.backward_passes)
            before, done_of = count - len(pending), dict.fromkeys(group, 0)

            def measured(
                index: int, done: int, total: int, before: int = before, done_of: dict[int, int] = done_of
            ) -> None:
                done_of[index] = done
                on_progress("scan", before * total + sum(done_of.values()), total * count)

            rounded = partial(on_progress, "rounding")
            for part in self._scans.run(group, in_file, self.backward_passes, measured, rounded, cancelled):
                self.add(part)
            report = self.report()
            on_estimate(report)
        self._scans.rounded.close()
        return report or self.report()

    def share_rounded(self, on_progress: OnStep = ignore, cancelled: IsCancelled = never) -> SharedRoundings | None:
        """Round the weights for the scans of other processes on this machine, if dtypes with a rounding are scanned. Returns where
        they find them, or None. `on_progress` and the errors are those of `run`.
        """
        self.scan_seconds += self._scans.rounded.make(partial(on_progress, "rounding"), cancelled)
        return self._scans.rounded.share()

    def measure(
        self, index: int, cancelled: IsCancelled = never, rounded: SharedRoundings | None = None
    ) -> ScannedSequence:
        """Scan the sequence with this index among the inputs. rounded: what `share_rounded` returned in another process. Raises
        NoForward, KernelError, Cancelled.
        """
        if rounded is not None:
            self._scans.rounded.use(rounded)
        _, in_file = self._scans.groups.next([index], self.backward_passes)
        (scanned,) = self._scans.run([index], in_file, self.backward_passes, ignore, ignore, cancelled)
        return scanned

    def add(self, part: ScannedSequence) -> None:
        """Add the results of one sequence, and save all results if the scan has a file."""
        self.done[part.index] = part.scores
        self.unit, self.roundings = part.unit, {**self.roundings, **part.roundings}
        self.forward_seconds += part.forward_seconds
        self.scan_seconds += part.scan_seconds
        self.save_if_wanted()

    def report(self) -> ScanReport:
        """Return the estimate from the sequences scanned so far. Raises UserError if no sequence is finished."""
        if not self.done:
            raise UserError("the scan has no estimate yet: no sequence is finished")
        in_order = [self.done[index] for index in sorted(self.done)]  # the order changes sums of floats
        costly = self._scans.costly
        scores = combine_scores(
            in_order, self.wanted, self.backward_passes, lambda name, dtype: dtype not in costly[name]
        )
        return self.report_of(self.backward_passes, len(self.done), scores, self.roundings)

    def saved(self) -> SavedScan:
        return SavedScan(
            self.fingerprint, self.backward_passes, self.unit, self.forward_seconds, self.scan_seconds, self.parts,
            self.done, shard=self.shard, roundings=self.roundings,
        )  # fmt: skip
