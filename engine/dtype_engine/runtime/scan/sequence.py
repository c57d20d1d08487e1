"""Scans one sequence: a forward pass with an autograd graph, the backward passes (`backward.py`), and further passes that measure
what gradients can't estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dtype_engine.core.errors import Cancelled, NoForward
from dtype_engine.core.kv_formats import KV_FORMATS, SCANNED
from dtype_engine.results.drift import unit_for
from dtype_engine.runtime.device import differentiable_recurrence, for_sums
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.numerics.compare.metrics import compared_rows
from dtype_engine.runtime.passes.class_dimensions import classes_dimension
from dtype_engine.runtime.passes.kept_positions import KeptPositions
from dtype_engine.runtime.passes.one_pass import PassResult
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.scan.backward import BackwardPasses
from dtype_engine.runtime.scan.cache_writes import CacheRecorder, CacheWrite
from dtype_engine.runtime.scan.companions import added_drift, companions_of
from dtype_engine.runtime.scan.gradient_sums import GradientSums
from dtype_engine.runtime.scan.graph_memory import GraphMemory
from dtype_engine.runtime.scan.measured_weights import (
    CastWeightsMode,
    measure_unfollowed,
    read_otherwise,
    weights_to_measure,
)
from dtype_engine.runtime.scan.probes import OutputProbes
from dtype_engine.runtime.scan.recorder import WeightOpRecorder
from dtype_engine.runtime.scan.routing import Key, SwapTopKMode, TopKSample, sample_calls, tokens_to_swap
from dtype_engine.runtime.scan.scores import SequenceScores

_OF_HELD = 4 / 3
"""The bytes of an autograd graph, divided by those of the arguments and outputs of the operations that use weights, in a Llama."""


@dataclass
class SequenceScan:
    """Scans a single sequence: runs its passes, and computes the sums that give the drift (score) of each cast."""

    runner: ForwardRunner
    wanted: Mapping[str, tuple[str, ...]]
    """The dtypes to which each weight may be cast, by weight name."""
    num_probes: int
    """The number of backward passes that start at the main output."""
    backward: BackwardPasses
    rereads: bool
    """Whether the autograd graph holds no copies of weights, and the backward passes make them again (`GraphMemory`)."""
    unit: str = ""
    forward_seconds: float = 0.0
    """How many seconds the forward pass with an autograd graph took."""
    elements: int = 1
    graph_bytes: int = 0
    """About how many bytes the autograd graph took, with the arguments and outputs of the recorded operations."""
    _recorder: WeightOpRecorder | None = None

    def run(self, batch: Batch, index: int, sequences: int) -> SequenceScores:
        """Return the estimated drift of each cast. index: the index of this sequence among the inputs. sequences: the number of all
        sequences. Raises NoForward, KernelError, Cancelled.
        """
        try:
            return self._run(batch, index, sequences)
        finally:
            self.backward.operations.clear()
            if self._recorder is not None:
                self._recorder.forget()

    def _run(self, batch: Batch, index: int, sequences: int) -> SequenceScores:
        model, backward = self.runner.model, self.backward
        ran, mode, writes = self._forward(batch)
        backward.operations = [*mode.operations, *writes]
        self.graph_bytes = round(_OF_HELD * mode.held_bytes) if backward.file is None else backward.file.nbytes
        (name, main), attended = main_output(ran.output), ran.attended
        del ran  # its output may hold keys and values of all layers
        if not main.requires_grad:
            raise NoForward(
                "the output does not depend on any weight through operations that have a gradient; "
                "scan --exact measures each weight without gradients"
            )
        self.elements = max(1, main.numel())
        module, shape = model.module, main.shape
        classes_dim = classes_dimension(module, name, main, self.runner.settings.classes_dim)
        distribution = classes_dim is not None
        masks = KeptPositions.of(module, batch, main.device, attended)
        kept = None if masks is None else masks.of_main(name, main)
        main = compared_rows(main, classes_dim, kept)
        probes = OutputProbes(main.detach(), distribution, self.num_probes, seed=index)
        self.unit = unit_for(classes_dim, len(shape))
        calls = sample_calls(mode.topk_calls, index, sequences)
        samples = [
            TopKSample(each.index, len(mode.topk_calls) / len(calls), each.margins.detach().tolist()) for each in calls
        ]
        sums = backward.run(main, probes, calls, seed=index)
        reference, costly, local = main.detach(), backward.costly, backward.local

        def drift(mode: ReferenceMode) -> float:
            if self.runner.cancelled():
                raise Cancelled
            output = main_output(self.runner.under(mode, partial(batch.run, module)).output)[1]
            return _drift(reference, compared_rows(output, classes_dim, kept), distribution)

        by_id, device = model.by_id, model.device

        def drift_of(cast: Mapping[str, str]) -> float:
            return drift(CastWeightsMode(by_id, device, cast, local))

        with torch.no_grad():
            for sample, call in zip(samples, calls, strict=True):
                rows = tokens_to_swap(call.margins.detach())
                sample.cost = drift(SwapTopKMode(by_id, device, call.index, rows)) / max(1, int(rows.sum()))

            def cast_drift(dtype: str, names: tuple[str, ...]) -> float:
                return drift_of(dict.fromkeys(names, dtype)) if names else 0.0

            together = dict(companions_of(operation.weights, model.weights) for operation in mode.operations)
            measured = {
                (name, dtype): added_drift(partial(cast_drift, dtype), name, together.get(name, ()))
                for name, dtype in weights_to_measure(mode.dtype_read, costly, index, sequences)
            }
            scores = self._scores(probes, sums, samples, 0.5 if distribution else 1.0, measured)
            followed = {name for (name, _), value in scores.sums.items() if value}
            unfollowed = mode.unfollowed | backward.differentiated | read_otherwise(mode.answers, costly, local)
            found = measure_unfollowed(drift_of, costly, unfollowed, followed, local)
            for key, value in found.items():
                scores.replace(key, value)
        return scores

    def _scores(
        self,
        probes: OutputProbes,
        sums: GradientSums,
        samples: list[TopKSample],
        half: float,
        measured: dict[Key, float],
    ) -> SequenceScores:
        of_keys: dict[Key, float] = {}
        independent: dict[Key, float] = {}
        for weight, products in sums.products.items():
            rows = products.square().tolist()
            apart = sums.squares[weight].tolist()
            for dtype, row, own in zip(self.backward.costly[weight], rows, apart, strict=True):
                key = (weight, dtype)
                squares = [half * square for square in row[: probes.count]]
                whole = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
                of_keys[key] = whole if probes.complete else whole / len(squares)
                independent[key] = half * own[0] / probes.count
                for sample, square, each in zip(samples, row[probes.count :], own[1:], strict=True):
                    sample.squares[key] = square if math.isfinite(square) else math.inf
                    sample.independent[key] = each
        return SequenceScores(probes.normalizer, of_keys, independent, probes.complete, samples, measured)

    def _forward(self, batch: Batch) -> tuple[PassResult[Any], WeightOpRecorder, list[CacheWrite]]:
        """Run the reference with an autograd graph. Returns (the result of the pass, the recorder of its operations, what the pass
        has written into KV caches that are scanned). If recorded tensors are overwritten later, the pass is repeated, and copies of
        them are recorded.
        """
        model, file = self.runner.model, self.backward.file
        names = {module: names for module, names in model.cache_names.items() if any(map(self.wanted.get, names))}
        keys = (dtype for of_module in names.values() for dtype in self.wanted.get(of_module[0], ()))
        queries = any(KV_FORMATS[dtype.removeprefix(SCANNED)].queries for dtype in keys)
        on_gradient = self.backward.on_gradient
        copies = frozenset[int]()
        while True:
            if self._recorder is not None:
                self._recorder.forget()
            memory = GraphMemory(model, self.rereads, self.backward.enter_block, file)
            mode = self._recorder = WeightOpRecorder(model, frozenset(self.wanted), on_gradient, copies, memory)
            caches = CacheRecorder(names, on_gradient, model.keys_read, queries) if names else None
            call = torch.enable_grad()(partial(batch.run, model.module))
            try:
                with memory.saving(), differentiable_recurrence(model.module, model.device):
                    ran = self.runner.under(mode, call, caches)
            except NoForward:
                if not self.rereads or model.memory.limited:
                    raise
                self.rereads = False  # torch.func.grad, for example, does not allow hooks on what a graph keeps
                continue
            self.forward_seconds = ran.seconds
            mode.release()
            if file is not None:
                file.write()
            overwritten = mode.overwritten
            if overwritten <= copies:  # copies do not change
                return ran, mode, [] if caches is None else caches.writes
            copies |= overwritten
            if file is not None:
                file.clear()


def _drift(reference: torch.Tensor, other: torch.Tensor, distribution: bool) -> float:
    """Return the KL divergence (or the squared difference, if the output is no distribution) of the output `other` from the
    reference's, in float64, summed over all positions. Returns infinity if the sum is not finite.
    """
    values = for_sums(reference).double()  # not kept, since many sequences may run side by side
    if not distribution:
        total = float((for_sums(other).double() - values).square().sum())
    else:
        log_p = torch.log_softmax(values, -1)
        p = log_p.exp()
        # If p is 0, the term is 0 for any q.
        gained = (log_p - torch.log_softmax(for_sums(other).double(), -1)).mul_(p)
        total = float(torch.where(p > 0, gained, 0.0).sum())
    return max(0.0, total) if math.isfinite(total) else math.inf
