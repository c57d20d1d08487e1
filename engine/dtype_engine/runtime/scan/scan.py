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
include are added: tokens that are routed to other experts (`routing`), and dtypes that the model's code reads
(`dtype_dependent_weights`). Weights whose effect has no gradient are measured, each in a separate pass (`measured_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dtype_engine.checkpoint import FileIdentity
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import STORED, RunSettings
from dtype_engine.core.shard import WHOLE, Shard
from dtype_engine.results.scan import ScanReport, WeightScore
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import reference_name
from dtype_engine.runtime.scan import saved as scan_file
from dtype_engine.runtime.scan.cache_writes import scored_bytes
from dtype_engine.runtime.scan.casts import scanned_dtypes
from dtype_engine.runtime.scan.saved import Fingerprint
from dtype_engine.runtime.scan.scores import SequenceScores, combine_scores
from dtype_engine.runtime.scan.sequence_scans import ScannedSequence, SequenceScans
from dtype_engine.search.families import FAMILIES, OWN

DEFAULT_DTYPES = FAMILIES[OWN].dtypes
FEWEST_DRAWS, SAMPLES = 4, 24

OnStep = Callable[[str, int, int | None], None]
OnEstimate = Callable[[ScanReport], None]


def default_draws(sequences: int) -> int:
    """Return the number of backward passes per sequence: 24 divided by the number of sequences, but at least 4.

    Each pass gives one sample of the drift that each cast causes (its score). With 24 samples in all, the standard error of a score
    is about 15 % if six dtypes are scanned. It is larger for fewer dtypes, because a weight's samples in all dtypes improve each of
    its scores (see `scores.py`).
    """
    return max(FEWEST_DRAWS, math.ceil(SAMPLES / max(1, sequences)))


@dataclass
class Scan:
    """Estimates a score for each weight and dtype: the drift of the model's output if only this weight is cast. The scan may be
    running, stopped or finished. `run` scans the remaining sequences: it calls `measure` and then `add` for each. Callers can do
    this themselves to scan sequences in other processes.
    """

    model: LiveModel
    inputs: Inputs
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    settings: RunSettings = field(default_factory=RunSettings)
    draws: int | None = None
    """The number of backward passes per sequence. If None, `default_draws` decides."""
    budget: int = 0
    """The maximum number of bytes for gradients and cast weights, and for the copies of weights that an autograd graph may hold;
    if 0, `LiveModel.cache_budget` at the start.
    """
    save: Path | None = None
    """The file in which the results are saved. It is read at the start and written after every sequence. If None, results are not
    saved.
    """
    done: dict[int, SequenceScores] = field(default_factory=dict)
    """The results of the finished sequences, by the index of the sequence."""
    unit: str = ""
    forward_seconds: float = 0.0
    scan_seconds: float = 0.0
    shard: Shard = WHOLE
    """Which of the sequences this process scans, if a scan is divided among several jobs."""
    on_unsaved: Callable[[str], None] | None = None
    """A function that is called with the reason if the file `save` can't be written. The scan then continues without saving. If
    None, UserError is raised instead.
    """
    _seen: FileIdentity | None = None

    def __post_init__(self) -> None:
        if self.model.reference == STORED:
            raise UserError(
                "a scan estimates drift from float32 arithmetic, and can't see what 16-bit arithmetic adds: measure each cast with "
                "--exact, or leave out --reference stored"
            )
        self.backward_passes = self.draws or default_draws(len(self.inputs.batches))
        self.fingerprint = Fingerprint.of(self.model, self.inputs, self.dtypes, self.settings)
        self.wanted = scanned_dtypes(self.model, self.dtypes)
        self.budget = self.budget or self.model.cache_budget
        self._scans = SequenceScans(self.model, self.inputs, self.settings, self.budget, self.wanted)
        if self.save is not None:
            self.keep_in(self.save)

    def keep_in(self, path: Path, on_unsaved: Callable[[str], None] | None = None) -> None:
        """Continue from the results in a file, if it exists, and save the results in it from now on.

        on_unsaved: called with the reason if the file can't be written; the scan then continues. Raises UserError, with nothing
        changed, if the file holds a different scan.
        """
        if path.exists():
            saved = scan_file.read(path, self.fingerprint, self.draws)
            self.done, self.unit, self.backward_passes = saved.done, saved.unit, saved.draws
            self.forward_seconds, self.scan_seconds = saved.forward_seconds, saved.scan_seconds
        self.save, self.on_unsaved = path, on_unsaved

    @property
    def parts(self) -> int:
        """The number of sequences in the whole scan."""
        return len(self.inputs.batches)

    @property
    def finished(self) -> bool:
        """Whether every sequence has been scanned."""
        return len(self.done) == self.parts

    @property
    def private_bytes(self) -> int:
        """The number of bytes that a process needs in addition to the mapped files: the largest weight in each dtype. The memory of
        autograd graphs is limited separately (`budget`).
        """
        return max((4 * weight.info.numel for weight in self.model.weights.values()), default=0) * (
            1 + len(self.dtypes)
        )

    def pending(self) -> list[int]:
        """Return the indexes of the sequences that this process still has to scan."""
        return [index for index in self.shard.of(range(self.parts)) if index not in self.done]

    def run(
        self,
        on_progress: OnStep = lambda step, done, total: None,
        on_estimate: OnEstimate = lambda report: None,
        cancelled: IsCancelled = never,
    ) -> ScanReport:
        """Scan the remaining sequences of this process, and return the report. `on_progress("scan", done, total)` is called with
        the numbers of finished operations and of all operations, and `on_estimate(report)` with the report after every sequence.

        Raises NoForward, KernelError and Cancelled. Finished sequences are kept; the next `run` scans those that are left.
        """
        report: ScanReport | None = None
        count = len(self.shard.of(range(self.parts)))
        for group, in_file in self._scans.groups.all(self.pending(), self.backward_passes):
            before = count - len(self.pending())
            done_of = dict.fromkeys(group, 0)

            def measured(
                index: int, done: int, total: int, before: int = before, done_of: dict[int, int] = done_of
            ) -> None:
                done_of[index] = done
                on_progress("scan", before * total + sum(done_of.values()), total * count)

            for part in self._scans.run(group, in_file, self.backward_passes, measured, cancelled):
                self.add(part)
            report = self.report()
            on_estimate(report)
        return report or self.report()

    def measure(
        self,
        index: int,
        on_measured: Callable[[int, int], None] = lambda done, total: None,
        cancelled: IsCancelled = never,
    ) -> ScannedSequence:
        """Scan one sequence and return its results. index: its index among the inputs; sequences may be scanned in any order.
        `on_measured(done, total)` is called with the numbers of finished operations and of all operations of the sequence.

        Raises NoForward, KernelError and Cancelled.
        """
        _, in_file = self._scans.groups.next([index], self.backward_passes)
        return self._scans.run(
            [index], in_file, self.backward_passes, lambda _, done, total: on_measured(done, total), cancelled
        )[0]

    def add(self, part: ScannedSequence) -> None:
        """Add the results of one sequence (`part`). If the scan has a file, save all results."""
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
        """Return the estimate from the sequences scanned so far. Raises UserError if no sequence is finished."""
        if not self.done:
            raise UserError("the scan has no estimate yet: no sequence is finished")
        in_order = [self.done[index] for index in sorted(self.done)]  # the order changes sums of floats
        costly = self._scans.costly
        scores = combine_scores(
            in_order, self.wanted, self.backward_passes, lambda name, dtype: dtype not in costly[name]
        )
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
                WeightScore(name, dtype, scored_bytes(self.model.tree, name, dtype), *scores[name, dtype])
                for name, targets in self.wanted.items()
                for dtype in targets
            ),
            notices=self.model.notices,
            activations=self.settings.quantize_activations,
            coverage=self.model.coverage,
            loader=self.model.loader,
        )

    def write(self, path: Path) -> None:
        """Save the results of all finished sequences. Raises UserError if the file can't be written."""
        self._seen = scan_file.write_joined(
            path,
            scan_file.SavedScan(
                self.fingerprint, self.backward_passes, self.unit, self.forward_seconds, self.scan_seconds, self.parts,
                self.done, shard=self.shard,
            ),
            self._seen,
        )  # fmt: skip
