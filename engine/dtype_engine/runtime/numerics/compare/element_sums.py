"""Sums over the elements of two outputs, r the reference's and c the candidate's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ElementSums:
    """Sums over elements of Δ = c - r: |Δ|, the largest |Δ|, Δ², r², c², rc, and counts of what is not finite."""

    elements: int = 0
    nonfinite: int = 0
    nonfinite_reference: int = 0
    sum_abs: float = 0.0
    max_abs: float = 0.0
    noise: float = 0.0
    energy: float = 0.0
    energy_candidate: float = 0.0
    product: float = 0.0

    def add(self, other: ElementSums) -> None:
        """Take in the sums of further elements."""
        self.elements += other.elements
        self.nonfinite += other.nonfinite
        self.nonfinite_reference += other.nonfinite_reference
        self.sum_abs += other.sum_abs
        self.max_abs = max(self.max_abs, other.max_abs)
        self.noise += other.noise
        self.energy += other.energy
        self.energy_candidate += other.energy_candidate
        self.product += other.product
