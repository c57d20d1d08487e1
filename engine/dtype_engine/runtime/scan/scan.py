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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dtype_engine.checkpoint import FileIdentity
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.dtypes import quantizes_activations
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_formats import SCANNED
from dtype_engine.core.options import STORED, RunSettings
from dtype_engine.core.shard import WHOLE, Shard
from dtype_engine.results.scan import ScanReport, WeightScore
from dtype_engine.runtime.device import cache_budget
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import copied_bytes, equals_reference, reference_name
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.runner import ForwardRunner, keeping_cache
from dtype_engine.runtime.scan import saved as scan_file
from dtype_engine.runtime.scan.cache_writes import scored_bytes
from dtype_engine.runtime.scan.kept_tensors import ActivationFile, free_for_activations
from dtype_engine.runtime.scan.local_errors import LocalErrors
from dtype_engine.runtime.scan.saved import Fingerprint
from dtype_engine.runtime.scan.scores import SequenceScores, combine_scores
from dtype_engine.runtime.scan.sequence import SequenceScan
from dtype_engine.search.families import FAMILIES, OWN

DEFAULT_DTYPES = FAMILIES[OWN].dtypes
FEWEST_DRAWS, SAMPLES = 4, 24
TIMED = 4
"""One of this many sequences is also run in a plain forward pass, to time it. For the other sequences, the time is estimated from
the output size.
"""

_SIDE_BY_SIDE = 8
"""The maximum number of sequences of a model larger than memory that are scanned side by side."""
_GRAPH_BYTES = 5
"""An estimate of the bytes of an autograd graph for each token and each row and column of a weight's matrix: 4 for the inputs and
outputs of products in float32, and 1 for what lies between them. A Llama with its sums, norms and attention has 4.7.
"""
_OUTPUT_BYTES = 16
"""About how many bytes of memory a sequence takes for each element of its main output: the output, probes and gradients, all in
float32.
"""
_FILE_BYTES = 1.5
"""The bytes of a file of activations with sums of squared gradients, divided by those of the autograd graph: at most."""
_LEAST_WAITING = 1 << 24
"""At least so many bytes of activations may wait to be written to a file."""

OnStep = Callable[[str, int, int | None], None]
OnEstimate = Callable[[ScanReport], None]


def default_draws(sequences: int) -> int:
    """Return the number of backward passes per sequence: 24 divided by the number of sequences, but at least 4.

    Each pass gives one sample of the drift that each cast causes (its score). With 24 samples in all, the standard error of a score
    is about 15 % if six dtypes are scanned. It is larger for fewer dtypes, because a weight's samples in all dtypes improve each of
    its scores (see `scores.py`).
    """
    return max(FEWEST_DRAWS, math.ceil(SAMPLES / max(1, sequences)))


def scanned_dtypes(model: LiveModel, targets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the dtypes to which casts of each weight are scanned: those of `targets`, and its stored dtype, which may also drift
    from the reference. The result also has the tensors of KV caches, with those formats of `targets` that begin with `kv:`.
    """
    of_weights = tuple(target for target in targets if not target.startswith(SCANNED))
    of_caches = tuple(target for target in targets if target.startswith(SCANNED))
    wanted = {
        name: tuple(dict.fromkeys((weight.info.dtype, *of_weights)))
        for name, weight in model.weights.items()
        if weight.info.castable and weight.info.persistent
    }
    if of_caches and not model.tree.caches:
        raise UserError(f"{of_caches[0]}: {model.tree.kv_cache.none_because or 'the model keeps no KV cache'}")
    return wanted | (dict.fromkeys(model.tree.caches, of_caches) if of_caches else {})


def is_free(model: LiveModel, name: str, dtype: str, settings: RunSettings) -> bool:
    """Return whether a cast causes no drift. It causes none if it rounds neither the weight `name` nor the activations multiplied
    by it, or if `name` is a tensor of a KV cache that stays in float32.
    """
    if name not in model.weights:
        return dtype == SCANNED + "float32"
    rounds = settings.quantize_activations == "weights" and quantizes_activations(dtype)
    return not rounds and equals_reference(model.weights[name], dtype)


@dataclass(frozen=True, slots=True)
class ScannedSequence:
    """The results of scanning one sequence, and the times that it took."""

    index: int
    scores: SequenceScores
    unit: str
    forward_seconds: float
    """How many seconds a plain forward pass over the sequence takes, measured or estimated."""
    scan_seconds: float
    """How many seconds the scan of this sequence took."""


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
    _can_reread: bool = True
    """False if the model does not run while the autograd graph holds no copies of weights."""
    _bytes_per_element: float | None = None
    """How many bytes of an autograd graph there are for each element of the largest input, as far as known."""
    _outputs_per_element: float | None = None
    """How many elements the main output has for each element of the largest input, as far as known."""

    def __post_init__(self) -> None:
        if self.model.reference == STORED:
            raise UserError(
                "a scan estimates drift from float32 arithmetic, and can't see what 16-bit arithmetic adds: measure each cast with "
                "--exact, or leave out --reference stored"
            )
        self.backward_passes = self.draws or default_draws(len(self.inputs.batches))
        self.fingerprint = Fingerprint.of(self.model, self.inputs, self.dtypes, self.settings)
        self.wanted = scanned_dtypes(self.model, self.dtypes)
        self._cached = {name.removeprefix(SCANNED) for name in self.dtypes if name.startswith(SCANNED)}
        self._behavior = ModelBehavior()
        self._costly = {
            name: tuple(dtype for dtype in targets if not self._free(name, dtype))
            for name, targets in self.wanted.items()
        }
        self.budget = self.budget or self.model.cache_budget
        compute = torch_dtype(self.settings.compute)
        self._local = LocalErrors(
            self.model.weights,
            compute,
            self.budget // 2,
            self.settings.quantize_activations == "weights",
        )
        self._pace: float | None = None
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

    def _free(self, name: str, dtype: str) -> bool:
        return is_free(self.model, name, dtype, self.settings)

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
        for group, in_file in self._groups():
            before = count - len(self.pending())
            done_of = dict.fromkeys(group, 0)

            def measured(
                index: int, done: int, total: int, before: int = before, done_of: dict[int, int] = done_of
            ) -> None:
                done_of[index] = done
                on_progress("scan", before * total + sum(done_of.values()), total * count)

            with self._runner(cancelled) as runner:
                run = self._measure
                works = [partial(run, runner, index, in_file, partial(measured, index), cancelled) for index in group]
                for part in runner.side_by_side(works):
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
        _, in_file = self._next_group([index])
        with self._runner(cancelled) as runner:
            return self._measure(runner, index, in_file, on_measured, cancelled)

    @contextmanager
    def _runner(self, cancelled: IsCancelled) -> Iterator[ForwardRunner]:
        caches, settings = self._cached, self.settings.of_weights()
        with ForwardRunner(self.model, settings, cancelled, watch=bool(caches), behavior=self._behavior) as runner:
            if caches:
                # A score is the drift of a reference run in which one cache is rounded, so the scales are those of its own values.
                runner.calibrate_caches(self.inputs.batches, caches, "reference")
            yield runner

    @property
    def _side_by_side(self) -> int:
        return 1 if self.model.visits is None else _SIDE_BY_SIDE

    def _groups(self) -> Iterator[tuple[list[int], bool]]:
        """Yield lists of the indexes of sequences that are scanned side by side, and whether their activations are written to a
        file until the backward passes.
        """
        pending = self.pending()
        while pending:
            group, in_file = self._next_group(pending)
            yield group, in_file
            pending = pending[len(group) :]

    def _next_group(self, pending: list[int]) -> tuple[list[int], bool]:
        """Return how many of the sequences `pending` to scan side by side, and whether to write their activations to a file. For a
        model in memory this is one sequence, without a file.

        A model that is larger than memory is read once for each group of sequences and pass. Of the autograd graphs, a quarter of
        the free memory is for those that are not in a file. With a file more sequences run side by side, but it must also be
        written, and read in each backward pass. What reads and writes fewer bytes for each sequence is chosen.
        """
        if self.model.visits is None:
            return pending[:1], False
        one_by_one = self._behavior.stateful or bool(self.model.side_settings)
        room, most = cache_budget(self.model.device), pending[: 1 if one_by_one else self._side_by_side]
        graph, disk = self._graph_bytes(pending[0]), free_for_activations() / _FILE_BYTES
        in_memory = _first_of(most, self._graph_bytes, room)
        if graph > disk or (len(in_memory) == len(most) and graph <= room):
            return in_memory, False
        in_file = _first_of(_first_of(most, self._graph_bytes, disk), self._bytes_beside_file, room)
        passes, weights = 1 + self.backward_passes, self.model.tree.stored_bytes
        graphs = sum(map(self._graph_bytes, in_file))
        if graph <= room and passes * weights / len(in_memory) <= passes * (weights + graphs) / len(in_file):
            return in_memory, False
        return in_file, True

    def _bytes_beside_file(self, index: int) -> float:
        """Return about how many bytes of memory a sequence takes whose activations are in a file: those of two blocks, and what is
        in proportion to its output.
        """
        assert self.model.visits is not None
        per_element = self._outputs_per_element
        if per_element is None:
            per_element = max(weight.info.shape[0] for weight in self.model.weights.values() if weight.info.shape)
        output = _OUTPUT_BYTES * per_element * self._longest(index)
        return output + 2 * self._graph_bytes(index) / max(1, len(self.model.visits.blocks))

    def _graph_bytes(self, index: int) -> float:
        """Return about how many bytes the autograd graph of a sequence takes: in proportion to the elements of its largest input,
        by the sequences that were scanned before or, for the first one, by the shapes of the weights.
        """
        if self._bytes_per_element is None:
            shapes = (weight.info.shape for weight in self.model.weights.values())
            self._bytes_per_element = _GRAPH_BYTES * sum(shape[-1] + shape[-2] for shape in shapes if len(shape) > 1)
        return self._bytes_per_element * self._longest(index)

    def _longest(self, index: int) -> int:
        tensors = self.inputs.batches[index].named_tensors()
        return max((tensor.numel() for _, tensor in tensors), default=1)

    def _measure(
        self,
        runner: ForwardRunner,
        index: int,
        in_file: bool,
        on_measured: Callable[[int, int], None],
        cancelled: IsCancelled,
    ) -> ScannedSequence:
        batch = runner.reference_batch(self.inputs.batches[index])
        if self._cached:
            batch = keeping_cache(batch)
        started = time.perf_counter()
        seconds = None
        if self.model.visits is None and (self._pace is None or index % TIMED == 0):
            seconds = runner.reference(partial(batch.run, self.model.module)).seconds
        rereads = self._can_reread and copied_bytes(self.model) > self.budget
        one = SequenceScan(
            self.model,
            runner,
            self.wanted,
            self._costly,
            self.backward_passes,
            self.budget // self._side_by_side,
            self._local,
            on_measured,
            cancelled,
            runner.amax_of("reference"),
            self.settings.classes_dim,
            rereads,
        )
        most = max(_LEAST_WAITING, self.budget // (2 * self._side_by_side))
        with closing(ActivationFile(most)) if in_file else nullcontext() as one.file:
            scores = one.run(batch, index, self.parts)
        self._can_reread = self._can_reread and one.rereads == rereads
        if self.model.visits is not None:
            self._bytes_per_element = one.graph_bytes / max(1, self._longest(index))
            self._outputs_per_element = one.elements / max(1, self._longest(index))
            seconds = one.forward_seconds  # another pass would read all weights again
        if self._pace is None or seconds is not None:
            self._pace = (seconds or 0.0) / one.elements
        return ScannedSequence(index, scores, one.unit, self._pace * one.elements, time.perf_counter() - started)

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


def _first_of(indexes: list[int], nbytes: Callable[[int], float], room: float) -> list[int]:
    """Return the first of the given sequences that take at most `room` bytes together, but at least one."""
    taken, total = list[int](), 0.0
    for index in indexes:
        total += nbytes(index)
        if taken and total > room:
            break
        taken.append(index)
    return taken
