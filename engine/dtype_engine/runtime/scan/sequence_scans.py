"""Scans sequences of the inputs, alone or side by side, and times them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.kv_formats import SCANNED
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import copied_bytes
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.runner import ForwardRunner, keeping_cache
from dtype_engine.runtime.scan.backward import BackwardPasses
from dtype_engine.runtime.scan.casts import is_free
from dtype_engine.runtime.scan.kept_tensors import ActivationFile
from dtype_engine.runtime.scan.local_errors import LocalErrors
from dtype_engine.runtime.scan.scanned_roundings import RoundingGains, ScannedRoundings
from dtype_engine.runtime.scan.scores import SequenceScores
from dtype_engine.runtime.scan.sequence import SequenceScan
from dtype_engine.runtime.scan.sequence_groups import SequenceGroups

TIMED = 4
"""One of this many sequences also runs in a plain forward pass, to time it. For the others, the time is estimated."""
_LEAST_WAITING = 1 << 24
"""At least so many bytes of activations may wait to be written to a file."""


@dataclass(frozen=True, slots=True)
class ScannedSequence:
    """The results of scanning one sequence."""

    index: int
    scores: SequenceScores
    unit: str
    forward_seconds: float
    """How many seconds a plain forward pass over the sequence takes, measured or estimated."""
    scan_seconds: float
    roundings: RoundingGains = field(default_factory=dict)
    """What the roundings did to weights, if dtypes with a rounding are scanned."""


@dataclass
class SequenceScans:
    """Scans sequences of the inputs, and remembers what the passes have shown about the model."""

    model: LiveModel
    inputs: Inputs
    settings: RunSettings
    budget: int
    """The maximum number of bytes for gradients, cast weights and copies of weights in an autograd graph."""
    wanted: Mapping[str, tuple[str, ...]]
    """The dtypes to which each weight may be cast, by weight name."""

    def __post_init__(self) -> None:
        model, settings, wanted, budget = self.model, self.settings, self.wanted, self.budget
        self.costly = {
            name: tuple(dtype for dtype in targets if not is_free(model, name, dtype, settings))
            for name, targets in wanted.items()
        }
        """By weight name: those dtypes of `wanted` in which a cast causes drift."""
        self.cached = {dtype.removeprefix(SCANNED) for name in model.tree.caches for dtype in wanted.get(name, ())}
        """The formats in which KV caches are scanned."""
        self.behavior = ModelBehavior()
        self.groups = SequenceGroups(model, self.inputs, self.behavior)
        rounds = settings.quantize_activations == "weights"
        self.rounded = ScannedRoundings(model, self.costly)
        compute = torch_dtype(settings.compute)
        self.local = LocalErrors(model.weights, compute, budget // 2, rounds, self.rounded)
        self._can_reread = True
        """False if the model does not run while the autograd graph holds no copies of weights."""
        self._pace: float | None = None
        """How many seconds a plain forward pass takes for each element of the main output, as far as known."""

    def run(
        self,
        indexes: list[int],
        in_file: bool,
        backward_passes: int,
        on_measured: Callable[[int, int, int], None],
        on_rounded: Callable[[int, int], None],
        cancelled: IsCancelled,
    ) -> list[ScannedSequence]:
        """Scan the sequences with these indexes side by side. in_file: whether to write their activations to a file until the
        backward passes. backward_passes: the number for each sequence. `on_measured(index, done, total)` is called with the numbers
        of finished operations and of all operations of a sequence. Before the first sequence, weights are rounded to dtypes with a
        rounding, and `on_rounded(done, total)` is called. Raises UserError, NoForward, KernelError and Cancelled.
        """
        rounding_seconds = self.rounded.make(on_rounded, cancelled)
        caches, settings = self.cached, self.settings.of_weights()
        with ForwardRunner(self.model, settings, cancelled, watch=bool(caches), behavior=self.behavior) as runner:
            if caches:
                # A score is the drift of a reference run in which one cache is rounded, so the scales are those of its own values.
                runner.calibrate_caches(self.inputs.batches, caches, "reference")
            measure = partial(self._measure, runner, in_file, backward_passes)
            first, *rest = runner.side_by_side([partial(measure, each, partial(on_measured, each)) for each in indexes])
        return [replace(first, scan_seconds=first.scan_seconds + rounding_seconds), *rest]

    def _measure(
        self,
        runner: ForwardRunner,
        in_file: bool,
        backward_passes: int,
        index: int,
        on_measured: Callable[[int, int], None],
    ) -> ScannedSequence:
        batch = runner.reference_batch(self.inputs.batches[index])
        if self.cached:
            batch = keeping_cache(batch)
        started = time.perf_counter()
        seconds = None
        if not self.model.memory.limited and (self._pace is None or index % TIMED == 0):
            seconds = runner.reference(partial(batch.run, self.model.module)).seconds
        rereads = self._can_reread and copied_bytes(self.model) > self.budget
        budget = self.budget // self.groups.most
        with closing(ActivationFile(max(_LEAST_WAITING, budget // 2))) if in_file else nullcontext() as file:
            backward = BackwardPasses(runner, self.costly, self.local, budget, file, on_measured)
            one = SequenceScan(runner, self.wanted, backward_passes, backward, rereads)
            scores = one.run(batch, index, len(self.inputs.batches))
        self._can_reread = self._can_reread and one.rereads == rereads
        if self.model.memory.limited:
            self.groups.note(index, one.graph_bytes, one.elements)
            seconds = one.forward_seconds  # another pass would read all weights again
        if self._pace is None or seconds is not None:
            self._pace = (seconds or 0.0) / one.elements
        seconds, taken = self._pace * one.elements, time.perf_counter() - started
        return ScannedSequence(index, scores, one.unit, seconds, taken, dict(self.rounded.roundings))
