"""Rows of a reference and a candidate output on the CPU that are close to each other, compared in float32.

That takes half of the time of float64, since what it works on stays in a core's cache, and gives the same to six digits and more:
δ = c - r is exact where c is within a factor of two of r (Sterbenz); other roundings, of 2^-24 either way, are of terms of which
thousands are added; and sums are of some hundred terms in float32, then in float64.

With p = softmax(r), x = δ - s of any number s, and the moments m_k = Σ p x^k, ln Σ e^c - ln Σ e^r is s + ln(1 + Σ m_k / k!), and KL
is that without s + m_1. As s the δ of the likeliest class is taken, since in a row where that has most of p nearly all of m_2 would
cancel. An error of p, which is one of e^r, then changes KL by the same share; in float64, from two sums of exponentials, KL has an
error of 10^-16 whatever it is.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

from dtype_engine.runtime.numerics.element_sums import ElementSums
from dtype_engine.runtime.numerics.position_figures import FinitePositions
from dtype_engine.runtime.numerics.reference_rows import ReferenceRows, first_of_largest

_IN_FLOAT32 = (torch.bfloat16, torch.float16, torch.float32)
_FEWEST_VALUES = 4096
"""Of fewer values the roundings do not even out."""
_SMALLEST, _LARGEST = 1e-12, 1e12
"""Where the largest |δ| lies, so that squares are in range, and those too small for it do not count."""
_EXP_IN_RANGE = 30.0
_TRUNCATED = 1e-9
_MOST_MOMENTS = 12
_ONE_OVER_FACTORIALS = np.array([1 / math.factorial(order) for order in range(1, _MOST_MOMENTS + 1)])
_MOST_CANCELLED = 1e3
"""How many times KL the square of m_1 may be."""
_BLOCK = 512
_CANCELLED = 1e-2
"""Σc² as Σr² + 2 Σrδ + Σδ² is exact to some 10^-8 where it is at least this share of Σr²."""


class RowsInFloat32:
    """Compares rows of two outputs, [rows, width] both, as they are taken, in buffers: each operation writes over one of them. What
    is small is done at the end for all rows at once.

    most: how many rows are taken at once, at most.
    """

    def __init__(
        self,
        reference: torch.Tensor,
        candidate: torch.Tensor,
        of_reference: ReferenceRows,
        positions: FinitePositions | None,
        most: int,
    ) -> None:
        count, width = reference.shape
        self._reference, self._candidate, self._of_reference = reference, candidate, of_reference
        self._positions = positions
        self._deltas, self._values = torch.empty(most, width), torch.empty(most, width)
        self._converted = self._deltas[:0] if reference.dtype == torch.float32 else torch.empty(most, width)
        block = _block_of(width)
        self._blocks = width // block, block
        self._absolute, self._norms = torch.zeros(count, width // block), torch.zeros(count, width // block)
        self._rows, self._largest, self._changes = list[slice](), list[float](), list[torch.Tensor]()
        if positions is not None:
            self._moments = torch.zeros(_MOST_MOMENTS, count, dtype=torch.float64)
            self._of_blocks = torch.empty(_MOST_MOMENTS, most, width // block)
            self._top = np.zeros(count, dtype=np.int64)
            in_range = np.abs(of_reference.largest).max(initial=0.0) <= _EXP_IN_RANGE
            self._shift = np.zeros(count) if in_range else of_reference.largest
            top = torch.from_numpy(of_reference.top)[:, None]
            self._of_top = candidate.gather(1, top).float().sub_(reference.gather(1, top).float())

    @staticmethod
    def can_take(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
        """Whether these outputs, [rows, width] both, have enough values in a row that float32 holds."""
        return {reference.dtype, candidate.dtype} <= set(_IN_FLOAT32) and reference.shape[1] >= _FEWEST_VALUES

    def take(self, rows: slice) -> bool:
        """Compare some rows; False where they are not finite, or not close."""
        if not self._of_reference.finite[rows].all():
            return False
        r, c = self._reference[rows], self._candidate[rows]
        r = r if r.dtype == torch.float32 else self._converted[: len(r)].copy_(r)
        delta, values = self._deltas[: len(r)].copy_(c), self._values[: len(r)]
        if self._positions is not None:
            self._top[rows] = first_of_largest(c, delta.numpy())
        delta.sub_(r)
        torch.abs(delta, out=values)
        largest = float(values.amax())
        if not _SMALLEST <= largest <= _LARGEST:
            return False
        count = 0
        if self._positions is not None:
            count = _moments_for(largest + float(self._of_top[rows].abs().max()))
            if count > _MOST_MOMENTS:
                return False
        self._rows.append(rows)
        self._largest.append(largest)
        torch.sum(self._in_blocks(values), -1, out=self._absolute[rows])
        torch.linalg.vector_norm(self._in_blocks(delta), dim=-1, out=self._norms[rows])
        self._changes.append(torch.dot(r.reshape(-1), delta.view(-1)))
        if count:
            self._take_moments(rows, r, delta, values, count)
        return True

    def _take_moments(
        self, rows: slice, r: torch.Tensor, delta: torch.Tensor, values: torch.Tensor, count: int
    ) -> None:
        """Of the δ of some rows, which are written over."""
        shift = self._shift[rows]
        if shift.any():
            torch.sub(r, torch.from_numpy(shift).float()[:, None], out=values).exp_()
        else:
            torch.exp(r, out=values)
        delta.sub_(self._of_top[rows])
        of_blocks = self._of_blocks[:count, : len(r)]
        for of_order in of_blocks:
            torch.sum(self._in_blocks(values.mul_(delta)), -1, out=of_order)
        self._moments[:count, rows] = of_blocks.sum(-1, dtype=torch.float64)

    def finish(self) -> tuple[list[ElementSums], list[slice]]:
        """The sums of the rows that were taken, whose positions are added, and those of them that take more digits."""
        taken, left = list[ElementSums](), list[slice]()
        noise = self._norms.double().square().sum(-1).numpy()
        absolute = self._absolute.sum(-1, dtype=torch.float64).numpy()
        exact = self._add_positions()
        width = self._reference.shape[1]
        for rows, largest, change in zip(self._rows, self._largest, map(float, self._changes), strict=True):
            energy, of_noise = float(self._of_reference.energy[rows].sum()), float(noise[rows].sum())
            energy_candidate = energy + 2 * change + of_noise
            if not (exact[rows].all() and math.isfinite(change) and energy_candidate >= _CANCELLED * energy):
                left.append(rows)
                continue
            taken.append(
                ElementSums(
                    width * (rows.stop - rows.start), sum_abs=float(absolute[rows].sum()), max_abs=largest, noise=of_noise,
                    energy=energy, energy_candidate=energy_candidate, product=energy + change,
                )
            )  # fmt: skip
        return taken, left

    def _add_positions(self) -> np.ndarray:
        """Add positions; whether those of each row are exact, [rows]."""
        exact: np.ndarray = np.ones(len(self._reference), dtype=np.bool_)
        if self._positions is None or not self._rows:
            return exact
        totals = np.exp(self._of_reference.log_total - self._shift)
        moments = self._moments.numpy() / totals
        log_growth = np.log1p(_ONE_OVER_FACTORIALS @ moments)
        kl = log_growth - moments[0]
        exact[moments[0] ** 2 > _MOST_CANCELLED * kl] = False
        log_ratio = self._of_top[:, 0].double().numpy() + log_growth
        same_top = self._top == self._of_reference.top
        for rows in self._rows:
            self._positions.add(rows, kl[rows], log_ratio[rows], same_top[rows])
        return exact

    def _in_blocks(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(len(values), *self._blocks)


@lru_cache(maxsize=64)
def _block_of(width: int) -> int:
    """How many values are summed in float32: few, and as many as divide the width."""
    return next(block for block in range(min(width, _BLOCK), width + 1) if width % block == 0)


def _moments_for(largest: float) -> int:
    """How many terms of e^x - 1 say it for |x| up to `largest`, but for a share `_TRUNCATED` of x² / 2; one more than
    `_MOST_MOMENTS` where these are too few.
    """
    for count in range(2, _MOST_MOMENTS + 1):
        if 2 * largest ** (count - 1) <= _TRUNCATED * math.factorial(count + 1):
            return count
    return _MOST_MOMENTS + 1
