"""How far a module's outputs are from the reference's: sums over all their elements, and the figures that follow."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dtype_engine.results.drift import ModuleDrift
from dtype_engine.runtime.numerics.compare.element_sums import ElementSums, element_sums
from dtype_engine.runtime.numerics.compare.metrics import sqnr_db


@dataclass(slots=True)
class ModuleSums:
    """One module's outputs, of one call or of many."""

    sums: ElementSums = field(default_factory=ElementSums)
    comparable: bool = True
    """Whether all outputs had the shapes of the reference's. Experts are given other tokens when the routing changes: then there
    is nothing to compare element by element."""

    def add(self, other: ModuleSums) -> None:
        """Take in further calls."""
        self.sums.add(other.sums)
        self.comparable = self.comparable and other.comparable

    def drift(self, name: str) -> ModuleDrift:
        """The figures of the module of this name; no SQNR where shapes differ, or where nothing in the reference is finite."""
        sums = self.sums
        compared = self.comparable and not (sums.nonfinite_reference and not sums.energy)
        figure = sqnr_db(sums.energy, sums.noise) if compared else None
        return ModuleDrift(name, figure, sums.max_abs, sums.nonfinite)


def compare_outputs(reference: torch.Tensor, candidate: torch.Tensor) -> ModuleSums:
    """One output of a module against the reference's, over all elements."""
    if reference.shape != candidate.shape:
        return ModuleSums(comparable=False)
    return ModuleSums(element_sums(reference, candidate))
