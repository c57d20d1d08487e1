"""Sums of gradients times local errors over the operations of one sequence.

Shapes: D dtypes of a weight; E elements of one output of an operation; B backward passes, of which the first are for probes,
followed by one for each sampled `topk`; T sampled `topk` calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dtype_engine.runtime.scan.kept_tensors import ActivationFile
from dtype_engine.runtime.weights.temporary_file import StoredVector


@dataclass(slots=True)
class Gradients:
    """The gradients with respect to one output of an operation."""

    each: list[tuple[int, torch.Tensor]]
    """Pairs (number of the backward pass, gradient [E])."""
    squares: list[tuple[int, torch.Tensor]]
    """Pairs (column of `GradientSums.squares`, squares of gradients [E])."""


@dataclass
class GradientSums:
    """Adds up products of gradients g and local errors Δ."""

    probes: int
    """The number of backward passes that start at the main output."""
    samples: int
    """The number of sampled `topk` calls (T)."""
    file: ActivationFile | None
    """The file in which the squares of gradients are kept between backward passes, or None if they stay in memory."""
    products: dict[str, torch.Tensor] = field(default_factory=dict)
    """By weight: Σ g·Δ, float64 [D, B], for its D dtypes and the B backward passes."""
    squares: dict[str, torch.Tensor] = field(default_factory=dict)
    """By weight: Σ g²Δ², float64 [D, 1 + T], with column 0 over all probes, and one column for each sampled `topk` call."""
    _partial: dict[tuple[int, int], torch.Tensor | StoredVector] = field(default_factory=dict)
    """The sums of the squared gradients of the probes until now, by the `id` of an operation and the index of its output."""

    @property
    def waiting(self) -> set[int]:
        """The `id`s of the operations whose squared gradients are being summed, and are not added to `squares` yet."""
        return {key for key, _ in self._partial}

    def gradients(self, given: list[tuple[int, torch.Tensor]], key: tuple[int, int], final: bool) -> Gradients | None:
        """Return the gradients in `given`, and the squares that can be added to `squares` now, or None if there are neither.
        Squares of a backward pass from a sampled `topk` call can be added at once. Those of the probes are summed until the last
        probe.

        given: the gradients with respect to one output, as pairs (number of the backward pass, gradient [E]). key: the `id` of the
        operation and the index of its output. final: whether this is the last probe.
        """
        squares = [(1 + column - self.probes, each.square()) for column, each in given if column >= self.probes]
        # Squares are added one by one, because torch takes ten times as long to sum over a first dimension of four.
        before = self._partial.pop(key, None)
        drawn = self.file.take(before) if isinstance(before, StoredVector) and self.file is not None else before
        assert not isinstance(drawn, StoredVector)
        for column, gradient in given:
            if column < self.probes:
                drawn = gradient.square() if drawn is None else drawn.addcmul_(gradient, gradient)
        if drawn is not None and final:
            squares.append((0, drawn))
        elif drawn is not None:
            instead_of = before if isinstance(before, StoredVector) else None
            self._partial[key] = drawn if self.file is None else self.file.put(drawn, instead_of)
        return Gradients(list(given), squares) if given or squares else None

    def add(self, weight: str, errors: torch.Tensor, gradients: Gradients) -> None:
        """Add the products of local errors [D, E] and the gradients of one output to the sums of `weight`. Overwrites `errors`."""
        if weight not in self.products:
            shape = len(errors), self.probes + self.samples
            self.products[weight] = torch.zeros(shape, dtype=torch.float64)
            self.squares[weight] = torch.zeros(shape[0], 1 + self.samples, dtype=torch.float64)
        errors = errors.to((gradients.each or gradients.squares)[0][1].dtype)
        _add_products(self.products[weight], errors, gradients.each)
        if gradients.squares:
            _add_products(self.squares[weight], errors.square_(), gradients.squares)


def _add_products(sums: torch.Tensor, errors: torch.Tensor, vectors: list[tuple[int, torch.Tensor]]) -> None:
    """Add the products of errors [D, E] and each (column, vector [E]) to sums [D, columns]. The products are computed one by one,
    because the last bits of a product of matrices depend on how many columns it has.
    """
    if vectors:
        products = torch.stack([errors @ vector for _, vector in vectors], 1).cpu().double()
        sums.index_add_(1, torch.tensor([column for column, _ in vectors]), products)
