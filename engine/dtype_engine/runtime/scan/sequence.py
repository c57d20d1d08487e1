"""One sequence of a scan: the pass with a graph, the backward passes, and the sums of g·Δ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled, NoForward, UserError
from dtype_engine.results.drift import unit_for
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.measure.comparison import is_distribution
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.passes.runner import main_output
from dtype_engine.runtime.scan.local_errors import LocalErrors
from dtype_engine.runtime.scan.probes import Directions
from dtype_engine.runtime.scan.routing import (
    Key,
    Selection,
    SelectionSample,
    SwapTopKMode,
    chosen,
    tokens_to_swap,
)
from dtype_engine.runtime.scan.scores import SequenceScores
from dtype_engine.runtime.scan.single_cast import SingleWeightCastMode, weights_to_measure
from dtype_engine.runtime.scan.weight_ops import Operation, WeightOpRecorder


@dataclass
class SequenceScan:
    """What a sequence is scanned with.

    wanted: dtypes by weight. costly: those of them that cost anything. draws: backward passes. room: bytes for gradients.
    on_measured hears of every operation that is done, and of how many. copies: what is known of operations whose
    tensors are written to later, by sequence; added to.
    """

    model: LiveModel
    wanted: Mapping[str, tuple[str, ...]]
    costly: Mapping[str, tuple[str, ...]]
    draws: int
    room: int
    local: LocalErrors
    copies: dict[int, frozenset[int]]
    on_measured: Callable[[int, int], None]
    cancelled: IsCancelled
    unit: str = ""
    elements: int = 1
    """Of the main output."""
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)
    _independent: dict[str, torch.Tensor] = field(default_factory=dict)
    _samples: list[SelectionSample] = field(default_factory=list)
    _operations: list[Operation] = field(default_factory=list)
    _column: int = 0
    _count: int = 0
    _last: bool = False
    _measured: int = 0

    def run(self, batch: Batch, index: int, sequences: int) -> SequenceScores:
        """Scan the sequence `index` of `sequences`. Raises NoForward, KernelError, Cancelled."""
        output, mode = self._forward(batch, index)
        self._operations = mode.operations
        name, main = main_output(output)
        if not main.requires_grad:
            raise NoForward("the output does not depend on any weight through operations that have a gradient")
        self.elements = max(1, main.numel())
        distribution = is_distribution(name, main)
        drawn = Directions(main.detach(), distribution, self.draws, seed=index)
        self.unit = unit_for(distribution, main.ndim)
        looked = chosen(mode.selections, index, sequences)
        self._samples = [
            SelectionSample(each.place, len(mode.selections) / len(looked), each.margins.detach().tolist())
            for each in looked
        ]
        self._backward(main, drawn, looked, seed=index)
        reference = _Reference(main.detach(), distribution)

        def drift(mode: ReferenceMode) -> float:
            """What a pass under another mode drifts by, summed over the positions."""
            if self.cancelled():
                raise Cancelled
            return reference.drift(main_output(self._call(batch, mode))[1])

        with torch.no_grad():
            for sample, selection in zip(self._samples, looked, strict=True):
                rows = tokens_to_swap(selection.margins.detach())
                by_id, device = self.model.by_id, self.model.device
                sample.cost = drift(SwapTopKMode(by_id, device, selection.place, rows)) / max(1, int(rows.sum()))
            measured = {
                key: drift(SingleWeightCastMode(self.model.by_id, self.model.device, *key))
                for key in weights_to_measure(mode.dtype_read, self.costly, index, sequences)
            }
        return self._found(drawn, 0.5 if distribution else 1.0, measured)

    def _found(self, drawn: Directions, half: float, measured: dict[Key, float]) -> SequenceScores:
        sums: dict[Key, float] = {}
        independent: dict[Key, float] = {}
        errors: dict[Key, float] = {}
        for weight, products in self._sums.items():
            rows = products.square().tolist()
            apart = self._independent[weight].tolist()
            for dtype, row, own in zip(self.costly[weight], rows, apart, strict=True):
                key = (weight, dtype)
                squares = [half * square for square in row[: self._count]]
                whole = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
                sums[key] = whole if drawn.complete else whole / len(squares)
                independent[key] = half * own[0] / self._count
                if not drawn.complete and len(squares) > 1 and math.isfinite(whole):
                    errors[key] = math.sqrt(
                        sum((square - sums[key]) ** 2 for square in squares) / (len(squares) - 1) / len(squares)
                    )
                for sample, square, each in zip(self._samples, row[self._count :], own[1:], strict=True):
                    sample.squares[key] = square if math.isfinite(square) else math.inf
                    sample.independent[key] = each
        return SequenceScores(drawn.mass, sums, independent, errors, drawn.complete, self._samples, measured)

    def _call(self, batch: Batch, mode: ReferenceMode) -> Any:
        try:
            with mode:
                return self.model.module(*batch.args, **batch.kwargs)
        except (Cancelled, UserError):
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise NoForward(f"the scan's forward pass failed: {type(error).__name__}: {text}") from error

    def _forward(self, batch: Batch, index: int) -> tuple[Any, WeightOpRecorder]:
        """Run the reference with a graph; once more when an operation's tensors were written to after it."""
        copies = self.copies.get(index, frozenset())
        while True:
            mode = WeightOpRecorder(self.model.by_id, self.model.device, frozenset(self.wanted), self._heard, copies)
            with torch.enable_grad():
                output = self._call(batch, mode)
            mode.passed()
            overwritten = mode.overwritten
            if not overwritten:
                return output, mode
            copies = self.copies[index] = copies | overwritten

    def _backward(self, main: torch.Tensor, drawn: Directions, looked: list[Selection], seed: int) -> None:
        """The margins first: their gradients are heard together with those of the first directions."""
        self._count = drawn.count
        signs = torch.Generator().manual_seed(seed)
        for place, selection in enumerate(looked):
            self._column = drawn.count + place
            direction = torch.randint(0, 2, selection.margins.shape, generator=signs).mul_(2).sub_(1)
            finite = torch.isfinite(selection.margins.detach())
            self._carry_back(selection.margins, direction.to(selection.margins) * finite, True)
        held = sum(output.nbytes for operation in self._operations for output in operation.outputs)
        group = max(1, min(drawn.count, 1 + self.room // 2 // max(1, held)))
        for place, direction in enumerate(drawn):
            self._last = place % group == group - 1 or place == drawn.count - 1
            self._column = place
            self._carry_back(main, direction, place < drawn.count - 1)
            if self._last:
                for operation in self._operations:
                    if any(operation.gradients):
                        self._measure(operation)

    def _carry_back(self, what: torch.Tensor, direction: torch.Tensor, again: bool) -> None:
        try:
            torch.autograd.backward(what, direction, retain_graph=again)
        except (Cancelled, UserError):
            raise
        except (RuntimeError, NotImplementedError) as error:
            text = " ".join(str(error).split())[:300]
            raise NoForward(f"the scan's backward pass failed: {text}") from error

    def _heard(self, operation: Operation, index: int, gradient: torch.Tensor) -> None:
        operation.gradients[index].append((self._column, gradient.detach().reshape(-1)))
        if self._last and len(operation.outputs) == 1:
            self._measure(operation)

    def _measure(self, operation: Operation) -> None:
        """Products of an operation's local errors with the gradients heard; these are forgotten."""
        if self.cancelled():
            raise Cancelled
        heard = [_Heard.of(each, self._count) if each else None for each in operation.gradients]
        for each in operation.gradients:
            each.clear()
        for weight in operation.weights:
            costly = self.costly.get(weight, ())
            if not costly:
                continue
            for gradients, errors in zip(heard, self.local.of(operation, weight, costly), strict=True):
                if gradients is not None:
                    self._add(weight, errors, gradients)
        self._measured += 1
        self.on_measured(self._measured, len(self._operations))

    def _add(self, weight: str, errors: torch.Tensor, heard: _Heard) -> None:
        """errors: [dtypes, elements], overwritten. heard: gradients of as many elements each."""
        if weight not in self._sums:
            shape = len(errors), self._count + len(self._samples)
            self._sums[weight] = torch.zeros(shape, dtype=torch.float64)
            self._independent[weight] = torch.zeros(shape[0], 1 + len(self._samples), dtype=torch.float64)
        errors = errors.to(heard.stacked.dtype)
        self._sums[weight].index_add_(1, heard.columns, torch.mm(errors, heard.stacked.T).double().cpu())
        apart = torch.mm(errors.square_(), heard.squares.T).double().cpu()
        self._independent[weight].index_add_(1, heard.apart, apart)


@dataclass(slots=True)
class _Heard:
    """Gradients of one output of an operation. stacked: [gradients, elements], and `columns` the number of each.

    squares: those of the directions drawn as one, and of each that belongs to a selection by itself, with their places in `apart`.
    """

    stacked: torch.Tensor
    columns: torch.Tensor
    squares: torch.Tensor
    apart: torch.Tensor

    @classmethod
    def of(cls, gradients: list[tuple[int, torch.Tensor]], count: int) -> _Heard:
        """`count`: of the directions; what has a number from there on belongs to a selection."""
        looked = [(column, gradient) for column, gradient in gradients if column >= count]
        # Summed one after the other: torch takes ten times as long over a first dimension of four.
        drawn = torch.zeros_like(gradients[0][1])
        for column, gradient in gradients:
            if column < count:
                drawn.addcmul_(gradient, gradient)
        return cls(
            torch.stack([gradient for _, gradient in gradients]),
            torch.tensor([column for column, _ in gradients]),
            torch.stack([drawn, *(gradient.square() for _, gradient in looked)]),
            torch.tensor([0, *(1 + column - count for column, _ in looked)]),
        )


class _Reference:
    """An output to compare others with, in float64, by the definitions of `metrics`; made ready once."""

    def __init__(self, output: torch.Tensor, distribution: bool) -> None:
        self.distribution = distribution
        self.values = output.double()
        if distribution:
            self.log_p = torch.log_softmax(self.values, -1)
            self.p = self.log_p.exp()

    def drift(self, other: torch.Tensor) -> float:
        """The sum over positions of the KL divergence, or of the squares of the differences; infinity where not finite."""
        if not self.distribution:
            total = float((other.double() - self.values).square().sum())
        else:
            # Where p is 0, nothing is added, whatever q is.
            gained = (self.log_p - torch.log_softmax(other.double(), -1)).mul_(self.p)
            total = float(torch.where(self.p > 0, gained, 0.0).sum())
        return max(0.0, total) if math.isfinite(total) else math.inf
