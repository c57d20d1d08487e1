"""Scans one sequence: a forward pass with an autograd graph, the backward passes, and sums of gradients times local errors.

Shapes: D dtypes of a weight; E elements of one output of an operation; N gradients for this output; B backward passes, of which the
first are for probes, followed by one for each sampled `topk`. Errors Δ [D, E]; gradients g [N, E]; sums of g·Δ [D, B] in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled, NoForward, UserError
from dtype_engine.core.foreign_code import foreign_code
from dtype_engine.core.options import ClassesDim
from dtype_engine.results.drift import unit_for
from dtype_engine.runtime.device import differentiable_recurrence, for_sums
from dtype_engine.runtime.formats.row_blocks import stopping
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.numerics.compare.metrics import compared_rows
from dtype_engine.runtime.passes.class_dimensions import classes_dimension
from dtype_engine.runtime.passes.kept_positions import KeptPositions
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.scan.cache_writes import CacheRecorder, CacheWrite
from dtype_engine.runtime.scan.companions import added_drift, companions_of
from dtype_engine.runtime.scan.dtype_dependent_weights import weights_to_measure
from dtype_engine.runtime.scan.kept_tensors import ActivationFile, KeptTensor
from dtype_engine.runtime.scan.local_errors import LocalErrors
from dtype_engine.runtime.scan.measured_weights import CastWeightsMode, measure_unfollowed, read_otherwise
from dtype_engine.runtime.scan.probes import OutputProbes
from dtype_engine.runtime.scan.routing import (
    Key,
    SwapTopKMode,
    TopKCall,
    TopKSample,
    sample_calls,
    tokens_to_swap,
)
from dtype_engine.runtime.scan.scores import SequenceScores
from dtype_engine.runtime.scan.weight_ops import WeightOp, WeightOpRecorder

_OF_HELD = 4 / 3
"""The bytes of an autograd graph, divided by those of the arguments and outputs of the operations that use weights, in a Llama."""


@dataclass
class SequenceScan:
    """Scans a single sequence: runs its forward pass and its backward passes, and computes the sums that give the drift (score) of
    each cast.
    """

    model: LiveModel
    runner: ForwardRunner
    wanted: Mapping[str, tuple[str, ...]]
    """The dtypes to which each weight may be cast, by weight name."""
    costly: Mapping[str, tuple[str, ...]]
    """By weight name: those dtypes of `wanted` to which a cast can change the output, because it rounds the weight or its
    activations.
    """
    num_probes: int
    """The number of backward passes that start at the main output."""
    budget: int
    """The maximum number of bytes for gradients."""
    local: LocalErrors
    on_measured: Callable[[int, int], None]
    """A function that is called as `on_measured(done, total)` with the numbers of measured operations and of all operations."""
    cancelled: IsCancelled
    amax: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The calibrated largest |value| of each head, float32 [heads], by the name of a KV cache's tensor."""
    classes: ClassesDim = "auto"
    """The setting `classes_dim`: the output dimension along which logits lie, "auto" or "none"."""
    rereads: bool = False
    """Whether the autograd graph holds no copies of weights, and the backward passes make them again (`WeightOpRecorder`)."""
    file: ActivationFile | None = None
    """Where activations are kept until the backward passes; None: in memory."""
    unit: str = ""
    forward_seconds: float = 0.0
    """How many seconds the forward pass with an autograd graph took."""
    elements: int = 1
    """The number of elements in the main output."""
    graph_bytes: int = 0
    """About how many bytes the autograd graph took, with the arguments and outputs of the recorded operations."""
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)
    _independent: dict[str, torch.Tensor] = field(default_factory=dict)
    _samples: list[TopKSample] = field(default_factory=list)
    _recorder: WeightOpRecorder | None = None
    _operations: list[WeightOp | CacheWrite] = field(default_factory=list)
    _squares: dict[tuple[int, int], torch.Tensor | KeptTensor] = field(default_factory=dict)
    """The sums of the squared gradients of the probes until now, by the `id` of an operation and the index of its output. Those in
    `file` have a `KeptTensor`.
    """
    _column: int = 0
    _count: int = 0
    _last: bool = False
    _final: bool = False
    _measured: int = 0
    _to_measure: int = 0
    _carrying: bool = False
    """Whether a backward pass of the scan is running. Backward passes of the model itself call the same hooks, which then must do
    nothing.
    """
    _differentiated: set[str] = field(default_factory=set)
    """The weights of operations that the model differentiates itself, for example with `torch.autograd.grad`. They affect the
    output also through the model's own gradients, not only through the outputs of these operations.
    """

    def run(self, batch: Batch, index: int, sequences: int) -> SequenceScores:
        """Scan the sequence `batch`, and return the estimated drift of each cast. index: the sequence's index among the inputs.
        sequences: the number of all sequences. Raises NoForward, KernelError, Cancelled.
        """
        try:
            return self._run(batch, index, sequences)
        finally:
            self._operations.clear()
            if self._recorder is not None:
                self._recorder.forget()

    def _run(self, batch: Batch, index: int, sequences: int) -> SequenceScores:
        output, mode, writes = self._forward(batch)
        self._operations = [*mode.operations, *writes]
        self.graph_bytes = round(_OF_HELD * mode.held_bytes) if self.file is None else self.file.nbytes
        name, main = main_output(output)
        del output  # it may hold keys and values of all layers
        if not main.requires_grad:
            raise NoForward(
                "the output does not depend on any weight through operations that have a gradient; "
                "scan --exact measures each weight without gradients"
            )
        self.elements = max(1, main.numel())
        module, shape = self.model.module, main.shape
        classes_dim = classes_dimension(module, name, main, self.classes)
        distribution = classes_dim is not None
        masks = KeptPositions.of(module, batch, main.device, self.runner.attended)
        kept = None if masks is None else masks.of_main(name, main)
        main = compared_rows(main, classes_dim, kept)
        probes = OutputProbes(main.detach(), distribution, self.num_probes, seed=index)
        self.unit = unit_for(classes_dim, len(shape))
        calls = sample_calls(mode.topk_calls, index, sequences)
        self._samples = [
            TopKSample(each.index, len(mode.topk_calls) / len(calls), each.margins.detach().tolist()) for each in calls
        ]
        self._backward(main, probes, calls, seed=index)
        reference = _Reference(main.detach(), distribution)

        def drift(mode: ReferenceMode) -> float:
            if self.cancelled():
                raise Cancelled
            output = main_output(self.runner.under(mode, partial(batch.run, module)))[1]
            return reference.drift(compared_rows(output, classes_dim, kept))

        by_id, device = self.model.by_id, self.model.device

        def drift_of(cast: Mapping[str, str]) -> float:
            return drift(CastWeightsMode(by_id, device, cast, self.local))

        with torch.no_grad():
            for sample, call in zip(self._samples, calls, strict=True):
                rows = tokens_to_swap(call.margins.detach())
                sample.cost = drift(SwapTopKMode(by_id, device, call.index, rows)) / max(1, int(rows.sum()))

            def cast_drift(dtype: str, names: tuple[str, ...]) -> float:
                return drift_of(dict.fromkeys(names, dtype)) if names else 0.0

            together = dict(companions_of(operation.weights, self.model.weights) for operation in mode.operations)
            measured = {
                (name, dtype): added_drift(partial(cast_drift, dtype), name, together.get(name, ()))
                for name, dtype in weights_to_measure(mode.dtype_read, self.costly, index, sequences)
            }
            scores = self._scores(probes, 0.5 if distribution else 1.0, measured)
            followed = {name for (name, _), value in scores.sums.items() if value}
            unfollowed = mode.unfollowed | self._differentiated | read_otherwise(mode.answers, self.costly, self.local)
            found = measure_unfollowed(drift_of, self.costly, unfollowed, followed, self.local)
            for key, value in found.items():
                scores.replace(key, value)
        return scores

    def _scores(self, probes: OutputProbes, half: float, measured: dict[Key, float]) -> SequenceScores:
        sums: dict[Key, float] = {}
        independent: dict[Key, float] = {}
        for weight, products in self._sums.items():
            rows = products.square().tolist()
            apart = self._independent[weight].tolist()
            for dtype, row, own in zip(self.costly[weight], rows, apart, strict=True):
                key = (weight, dtype)
                squares = [half * square for square in row[: self._count]]
                whole = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
                sums[key] = whole if probes.complete else whole / len(squares)
                independent[key] = half * own[0] / self._count
                for sample, square, each in zip(self._samples, row[self._count :], own[1:], strict=True):
                    sample.squares[key] = square if math.isfinite(square) else math.inf
                    sample.independent[key] = each
        return SequenceScores(probes.normalizer, sums, independent, probes.complete, self._samples, measured)

    def _forward(self, batch: Batch) -> tuple[Any, WeightOpRecorder, list[CacheWrite]]:
        """Run the reference with an autograd graph. Returns (its output, the recorder of its operations, what it has written into
        KV caches that are scanned). If recorded tensors are overwritten later, it runs again and records copies of them.
        """
        names = {module: names for module, names in self.model.cache_names.items() if any(map(self.wanted.get, names))}
        copies = frozenset[int]()
        while True:
            if self._recorder is not None:
                self._recorder.forget()
            mode = self._recorder = WeightOpRecorder(
                self.model.by_id, self.model.device, frozenset(self.wanted), self._on_gradient, copies,
                self.rereads, self.model.visits, self._enter_block, self.file,
            )  # fmt: skip
            caches = CacheRecorder(names, self._on_gradient) if names else None
            call = torch.enable_grad()(partial(batch.run, self.model.module))
            try:
                with mode.saving(), differentiable_recurrence(self.model.module, self.model.device):
                    output = self.runner.under(mode, call, caches)
            except NoForward:
                if not self.rereads or self.model.visits is not None:
                    raise
                self.rereads = False  # torch.func.grad, for example, does not allow hooks on what a graph keeps
                continue
            self.forward_seconds = self.runner.last_seconds
            mode.release()
            if self.file is not None:
                self.file.write()
            overwritten = mode.overwritten
            if overwritten <= copies:  # copies do not change
                return output, mode, [] if caches is None else caches.writes
            copies |= overwritten
            if self.file is not None:
                self.file.clear()

    def _enter_block(self, name: str) -> None:
        if self.file is not None and self.model.visits is not None and self.model.visits.inside != name:
            self.file.end_block()  # other sequences may run before this one goes on
        self.runner.enter_block(name)

    def _backward(self, main: torch.Tensor, probes: OutputProbes, calls: list[TopKCall], seed: int) -> None:
        """Run all backward passes: first those that start at the margins of routers, then those that start at the main output.

        calls: the sampled `topk` calls, whose margins are used. seed: the seed of the random signs with which backward passes start
        at the margins.
        """
        self._count = probes.count
        signs = torch.Generator().manual_seed(seed)
        for number, call in enumerate(calls):
            self._column = probes.count + number
            probe = torch.randint(0, 2, call.margins.shape, generator=signs).mul_(2).sub_(1)
            finite = torch.isfinite(call.margins.detach())
            self._carry_back(call.margins, probe.to(call.margins) * finite, True)
        held = sum(output.nbytes for operation in self._operations for output in operation.outputs)
        # The sums do not depend on how many gradients are held at a time, and so not on the memory that is free.
        group = max(1, min(probes.count, 1 + self.budget // 2 // max(1, held)))
        self._to_measure = len(self._operations) * -(-probes.count // group)
        for number, probe in enumerate(probes):
            self._last = number % group == group - 1 or number == probes.count - 1
            self._column = number
            self._final = number == probes.count - 1
            self._carry_back(main, probe, not self._final)
            if self._last:
                waiting = {key for key, _ in self._squares} if self._final else ()
                for operation in self._operations:
                    if id(operation) in waiting or any(operation.gradients):
                        self._measure(operation)

    def _carry_back(self, output: torch.Tensor, gradient: torch.Tensor, retain_graph: bool) -> None:
        try:
            self._carrying = True
            # In this thread: another, which torch would start for an accelerator, is not set up for it.
            with foreign_code(), torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(output, gradient, retain_graph=retain_graph)
        except (Cancelled, UserError):
            raise
        except (RuntimeError, NotImplementedError) as error:
            text = " ".join(str(error).split())[:300]
            raise NoForward(
                f"the scan's backward pass failed: {text}; scan --exact measures each weight without one"
            ) from error
        finally:
            self._carrying = False
            if self.file is not None:
                self.file.end_block()

    def _on_gradient(self, operation: WeightOp | CacheWrite, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return  # on CUDA, torch calls the hook of an output of a recurrent layer that the loss does not depend on
        if not self._carrying:
            self._differentiated.update(operation.weights)
            return
        operation.gradients[index].append((self._column, gradient.detach().reshape(-1)))
        if self._last and len(operation.outputs) == 1:
            self._measure(operation)

    def _measure(self, operation: WeightOp | CacheWrite) -> None:
        if self.cancelled():
            raise Cancelled
        if isinstance(operation, WeightOp) and operation.block:
            self._enter_block(operation.block)
        gradients_of = []
        for index, each in enumerate(operation.gradients):
            gradients_of.append(self._gradients(each, (id(operation), index)))
            each.clear()
        loaded = operation.loaded(self.file) if isinstance(operation, WeightOp) else operation
        for weight in loaded.weights:
            costly = self.costly.get(weight, ())
            if not costly:
                continue
            if isinstance(loaded, CacheWrite):
                errors_of = loaded.errors(costly, self.amax)
            else:
                with stopping(self.cancelled):  # casts of a large weight to all dtypes take many seconds
                    errors_of = self.local.of(loaded, weight, costly)
            for gradients, errors in zip(gradients_of, errors_of, strict=True):
                if gradients is not None:
                    self._add(weight, errors, gradients)
        self._measured += 1
        self.on_measured(self._measured, self._to_measure)

    def _add(self, weight: str, errors: torch.Tensor, gradients: _Gradients) -> None:
        if weight not in self._sums:
            shape = len(errors), self._count + len(self._samples)
            self._sums[weight] = torch.zeros(shape, dtype=torch.float64)
            self._independent[weight] = torch.zeros(shape[0], 1 + len(self._samples), dtype=torch.float64)
        errors = errors.to((gradients.each or gradients.squares)[0][1].dtype)
        _add_products(self._sums[weight], errors, gradients.each)
        if gradients.squares:
            _add_products(self._independent[weight], errors.square_(), gradients.squares)

    def _gradients(self, given: list[tuple[int, torch.Tensor]], key: tuple[int, int]) -> _Gradients | None:
        """Return the gradients with respect to one output, or None if there are none. The sum of the squares over the probes is
        complete with the last probe. given: pairs (number of the backward pass, gradient [elements]). key: a key of `_squares`.
        """
        squares = [(1 + column - self._count, each.square()) for column, each in given if column >= self._count]
        # Squares are added one by one, because torch takes ten times as long to sum over a first dimension of four.
        before = self._squares.pop(key, None)
        drawn = self.file.take(before) if isinstance(before, KeptTensor) and self.file is not None else before
        assert not isinstance(drawn, KeptTensor)
        for column, gradient in given:
            if column < self._count:
                drawn = gradient.square() if drawn is None else drawn.addcmul_(gradient, gradient)
        if drawn is not None and self._final:
            squares.append((0, drawn))
        elif drawn is not None:
            instead_of = before if isinstance(before, KeptTensor) else None
            self._squares[key] = drawn if self.file is None else self.file.put(drawn, instead_of)
        return _Gradients(list(given), squares) if given or squares else None


def _add_products(sums: torch.Tensor, errors: torch.Tensor, vectors: list[tuple[int, torch.Tensor]]) -> None:
    """Add the products of errors [dtypes, elements] and vectors to columns of sums [dtypes, columns]. vectors: pairs (column,
    vector [elements]).

    The products are computed one by one, because the last bits of a product of matrices depend on how many columns it has.
    """
    if vectors:
        products = torch.stack([errors @ vector for _, vector in vectors], 1).cpu().double()
        sums.index_add_(1, torch.tensor([column for column, _ in vectors]), products)


@dataclass(slots=True)
class _Gradients:
    """The gradients with respect to one output of an operation."""

    each: list[tuple[int, torch.Tensor]]
    """Pairs (number of the backward pass, gradient [elements])."""
    squares: list[tuple[int, torch.Tensor]]
    """Pairs (column of the sums Σ g²Δ² in `SequenceScan._independent`, squares of gradients [elements]). Column 0 has the sum over
    all probes, and each further column is for the backward pass of one sampled `topk` call.
    """


class _Reference:
    """The output of the reference run, with which other outputs are compared in float64. `numerics.compare.metrics` defines the
    metrics.
    """

    def __init__(self, output: torch.Tensor, distribution: bool) -> None:
        self.distribution = distribution
        self.output = output

    def drift(self, other: torch.Tensor) -> float:
        """Return the KL divergence (or the squared difference, if the output is no distribution) of the output `other` from the
        reference's, summed over all positions. Returns infinity if the sum is not finite.
        """
        values = for_sums(self.output).double()  # not kept, since many sequences may run side by side
        if not self.distribution:
            total = float((for_sums(other).double() - values).square().sum())
        else:
            log_p = torch.log_softmax(values, -1)
            p = log_p.exp()
            # If p is 0, the term is 0 for any q.
            gained = (log_p - torch.log_softmax(for_sums(other).double(), -1)).mul_(p)
            total = float(torch.where(p > 0, gained, 0.0).sum())
        return max(0.0, total) if math.isfinite(total) else math.inf
