"""How far a module's outputs are from the reference's: sums over all their elements, and the figures that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dtype_engine.results.drift import ModuleDrift
from dtype_engine.runtime.numerics.compare.element_sums import ElementSums, sum_chunks, sums_of_any, widen
from dtype_engine.runtime.numerics.compare.metrics import sqnr_db

_CHUNK_ELEMENTS = 1 << 17
"""Elements of which two float64 copies stay in the cache of one core."""
_GPU_CHUNK_ELEMENTS = 1 << 22
"""On a GPU: 67 MB of such copies."""


@dataclass(slots=True)
class ModuleSums:
    """One module's outputs, of one call or of many."""

    sums: ElementSums = field(default_factory=ElementSums)
    comparable: bool = True
    """Whether all outputs had the shapes of the reference's, and rows of the same tokens. Experts are given other tokens when the
    routing changes: then there is nothing to compare element by element."""
    rerouted: int = 0
    """Of a router: how many tokens it had in a call in which it chose other experts for one of them."""

    def add(self, other: ModuleSums) -> None:
        """Take in further calls."""
        self.sums.add(other.sums)
        self.comparable = self.comparable and other.comparable
        self.rerouted = self.rerouted or other.rerouted

    def drift(self, name: str) -> ModuleDrift:
        """The figures of the module of this name; no SQNR where shapes differ, or where nothing in the reference is finite."""
        sums = self.sums
        compared = self.comparable and not (sums.nonfinite_reference and not sums.energy)
        figure = sqnr_db(sums.energy, sums.noise) if compared else None
        return ModuleDrift(name, figure, sums.max_abs, sums.nonfinite)

    @classmethod
    def not_comparable(cls, reference: torch.Tensor, candidate: torch.Tensor) -> ModuleSums:
        """Of outputs whose elements do not belong together: how many more are not finite than in the reference."""
        counts = [int((~torch.isfinite(output)).sum()) for output in (reference, candidate)]
        return cls(ElementSums(nonfinite=max(0, counts[1] - counts[0])), comparable=False)


def compare_outputs(reference: torch.Tensor, candidate: torch.Tensor, kept: torch.Tensor | None = None) -> ModuleSums:
    """One output of a module against the reference's, over all elements.

    kept: a mask of the output's first dimensions, bool: only these positions are compared.

    Only the sums are taken that a module's figures need, in float64: with all those of the main output it takes twice as long.
    """
    if reference.shape != candidate.shape:
        return ModuleSums.not_comparable(reference, candidate)
    if kept is not None:
        reference, candidate = reference[kept], candidate[kept]
    reference, candidate = reference.detach().reshape(-1), candidate.detach().reshape(-1)

    def sums_of(chunk: slice, buffers: Sequence[torch.Tensor]) -> ElementSums:
        r, delta = buffers
        widen(reference[chunk], r)
        widen(candidate[chunk], delta).sub_(r)
        sums = [torch.dot(delta, delta), torch.dot(r, r), delta.abs_().amax()]
        noise, energy, max_abs = torch.stack(sums).tolist()
        if not math.isfinite(noise):
            return sums_of_any(r, widen(candidate[chunk], delta))
        return ElementSums(len(r), max_abs=max_abs, noise=noise, energy=energy)

    step = _CHUNK_ELEMENTS if candidate.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    return ModuleSums(sum_chunks(sums_of, candidate, step, 2))
