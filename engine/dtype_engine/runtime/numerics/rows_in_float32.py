"""Rows of a reference and a candidate output on the CPU, compared in float32 by machine code (`row_kernel`).

Figures have seven digits and more: δ = c - r is exact where c is within a factor of two of r (Sterbenz); other roundings, of 2^-24
either way, are of terms of which thousands are added; and sums are of some hundred terms in float32, then in float64.

With p = softmax(r) and x = δ - s of any number s, ln Σ e^c - ln Σ e^r is s + ln(1 + Σpx + Σp(e^x - 1 - x)), and KL is that without
s + Σpx. As s the δ of the likeliest class is taken, since in a row where that has most of p the logarithm and Σpx would nearly
cancel. An error of p, which is one of e^r, then changes KL by the same share; in float64, from two sums of exponentials, KL has an
error of 10^-16 whatever it is.
"""

from __future__ import annotations

import numpy as np
import torch

from dtype_engine.runtime.numerics.compare.element_sums import ElementSums
from dtype_engine.runtime.numerics.compare.position_figures import FinitePositions
from dtype_engine.runtime.numerics.compare.reference_rows import ReferenceRows
from dtype_engine.runtime.numerics.machine_code import FEWEST_VALUES
from dtype_engine.runtime.numerics.row_kernel import FARTHEST, RowKernel

_SMALLEST, _LARGEST = 1e-12, 1e12
"""Where the largest |δ| of a row lies that is not zero, so that squares are in range, and those too small for it do not count."""
_MOST_CANCELLED = 1e3
"""How many times KL the square of Σpx may be."""
_CANCELLED = 1e-3
"""Σc² as Σr² + 2 Σrδ + Σδ² has its digits where it is at least this share of Σr²."""


class RowsInFloat32:
    """Compares rows of two outputs, [rows, width] both, for which it `can_take` them."""

    def __init__(
        self,
        reference: torch.Tensor,
        candidate: torch.Tensor,
        of_reference: ReferenceRows,
        positions: FinitePositions | None,
    ) -> None:
        self._width, self._of_reference = reference.shape[1], of_reference
        largest = torch.from_numpy(of_reference.largest).float()
        shift = torch.zeros(len(largest))
        if positions is not None:
            top = torch.from_numpy(of_reference.top)[:, None]
            shift = candidate.gather(1, top)[:, 0].float() - reference.gather(1, top)[:, 0].float()
        self._shift = shift.double().numpy()
        kernel = RowKernel.of(reference.dtype, candidate.dtype, positions is not None)
        self._sums = kernel.sums(reference, candidate, largest, shift)
        with np.errstate(all="ignore"):  # rows that are not finite
            self._energy_candidate = of_reference.energy + 2 * self._sums.moved + self._sums.noise
            self._exact = self._in_range()
            if positions is not None:
                self._add_positions(positions)

    @staticmethod
    def can_take(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
        """Whether these outputs, [rows, width] both, have enough values in a row, and there is code for their dtypes."""
        return reference.shape[1] >= FEWEST_VALUES and RowKernel.is_available(reference.dtype, candidate.dtype)

    def of(self, rows: slice) -> ElementSums | None:
        """The sums of some rows, whose positions are added; None where one of them is not finite, or takes more digits."""
        if not self._exact[rows].all():
            return None
        energy, sums = float(self._of_reference.energy[rows].sum()), self._sums
        return ElementSums(
            self._width * (rows.stop - rows.start),
            sum_abs=float(sums.absolute[rows].sum()),
            max_abs=float(sums.largest[rows].max()),
            noise=float(sums.noise[rows].sum()),
            energy=energy,
            energy_candidate=float(self._energy_candidate[rows].sum()),
            product=energy + float(sums.moved[rows].sum()),
        )

    def _in_range(self) -> np.ndarray:
        """Whether the sums of each row are exact, [rows]."""
        largest, energy = self._sums.largest, self._of_reference.energy
        in_range = (largest == 0) | ((largest >= _SMALLEST) & (largest <= _LARGEST))
        finite = self._of_reference.finite & np.isfinite(self._sums.noise)
        exact: np.ndarray = finite & in_range & (self._energy_candidate >= _CANCELLED * energy)
        return exact

    def _add_positions(self, positions: FinitePositions) -> None:
        """Add those that are exact, and note which are not."""
        sums, of_reference = self._sums, self._of_reference
        self._exact &= sums.largest + np.abs(self._shift) <= FARTHEST
        total = np.exp(of_reference.log_total - of_reference.largest)
        first = sums.first / total
        log_growth = np.log1p(first + sums.rest / total)
        kl = log_growth - first
        self._exact &= first**2 <= _MOST_CANCELLED * kl
        exact = self._exact
        log_ratio, same_top = self._shift + log_growth, sums.top == of_reference.top
        positions.add(exact, kl[exact], log_ratio[exact], same_top[exact])
