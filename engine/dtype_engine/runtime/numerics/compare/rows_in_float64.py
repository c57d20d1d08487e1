"""Rows of a reference and a candidate output on the CPU, all finite, compared in float64."""

from __future__ import annotations

import math

import numpy as np
import torch

from dtype_engine.runtime.numerics.compare.element_sums import ElementSums
from dtype_engine.runtime.numerics.compare.position_figures import FinitePositions
from dtype_engine.runtime.numerics.compare.reference_rows import Exponentials, ReferenceRows, exponentiate, widen

_CANCELLED = 1e-3
"""Σc² as Σr² + 2 Σrδ + Σδ² is exact to 10^-13 where it is at least this share of Σr²."""


class RowsInFloat64:
    """Compares rows of two outputs, [rows, width] both, in three buffers: each operation writes over one of them."""

    def __init__(
        self,
        reference: torch.Tensor,
        candidate: torch.Tensor,
        of_reference: ReferenceRows,
        positions: FinitePositions | None,
    ) -> None:
        self._reference, self._candidate, self._of_reference = reference, candidate, of_reference
        self._positions = positions
        self._buffers: list[torch.Tensor] = []

    def compare(self, rows: slice) -> ElementSums | None:
        """The sums of some rows, whose positions are added; None where a value is not finite."""
        if not self._of_reference.finite[rows].all():
            return None
        reference, candidate = self._reference[rows], self._candidate[rows]
        of_reference, known = self._of_reference, rows
        if not of_reference.in_float64:
            of_reference = ReferenceRows(reference, self._positions is not None, in_float64=True)
            known = slice(0, len(reference))
        if not self._buffers or len(self._buffers[0]) < len(reference):
            self._buffers = [torch.empty(reference.shape, dtype=torch.float64) for _ in range(3)]
        r, c, delta = (buffer[: len(reference)] for buffer in self._buffers)
        widen(reference, r)
        widen(candidate, c)
        torch.sub(c, r, out=delta)
        flat_r, flat_delta = r.view(-1), delta.view(-1)
        noise = float(torch.dot(flat_delta, flat_delta))
        if not math.isfinite(noise):
            return None
        energy, change = float(of_reference.energy[known].sum()), float(torch.dot(flat_r, flat_delta))
        energy_candidate = energy + 2 * change + noise
        if energy_candidate < _CANCELLED * energy:
            energy_candidate = float(torch.dot(c.view(-1), c.view(-1)))
        if self._positions is not None:
            total = of_reference.log_total[known] - exponentiate(r, of_reference.largest[known], r)
            moved = r.mul_(delta).sum(-1).numpy() / np.exp(total)
            of_candidate = Exponentials(candidate, c)
            log_ratio = of_candidate.log_total - of_reference.log_total[known]
            # ln Σ e^c - ln Σ e^r - Σ p δ
            self._positions.add(rows, log_ratio - moved, log_ratio, of_candidate.top == of_reference.top[known])
        sums = ElementSums(
            delta.numel(), noise=noise, energy=energy, energy_candidate=energy_candidate, product=energy + change
        )
        sums.sum_abs = float(flat_delta.abs_().sum())
        sums.max_abs = float(flat_delta.amax()) if len(flat_delta) else 0.0
        return sums
