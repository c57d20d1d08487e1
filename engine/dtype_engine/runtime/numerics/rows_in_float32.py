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
from dtype_engine.runtime.numerics.reference_rows import ReferenceRows, bits_of, logits_of

_IN_FLOAT32 = (torch.bfloat16, torch.float16, torch.float32)
_FEWEST_VALUES = 4096
"""Of fewer values the roundings do not even out."""
_SMALLEST, _LARGEST = 1e-12, 1e12
"""Where the largest |δ| lies, so that squares are in range, and those too small for it do not count."""
_EXP_IN_RANGE = 30.0
_TRUNCATED = 1e-7
"""The share of KL that the terms which are left out may be: what float32 rounds off."""
_MOST_MOMENTS = 12
_ONE_OVER_FACTORIALS = np.array([1 / math.factorial(order) for order in range(1, _MOST_MOMENTS + 1)])
_MOST_CANCELLED = 1e3
"""How many times KL the square of m_1 may be."""
_BLOCK = 512
_CANCELLED = 1e-2
"""Σrc as half of Σr² + Σc² - Σδ² has six digits of ‖r‖‖c‖ where Σc² is at least this share of Σr²."""


class RowsInFloat32:
    """Compares rows of two outputs, [rows, width] both, as they are taken, in buffers: each operation writes over one of them. What
    is small is done at the end for all rows at once, since a call takes as long as some ten thousand values.

    most: rows are taken so many at a time from the first on, at the end fewer.
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
        self._candidate, self._of_reference, self._positions = candidate, of_reference, positions
        self._most, self._width = most, width
        self._of_reference_rows, self._of_candidate_rows = torch.split(reference, most), torch.split(candidate, most)
        block = _block_of(width)
        converted = None if reference.dtype == torch.float32 else torch.empty(most, width)
        self._buffers = _Buffers(torch.empty(most, width), torch.empty(most, width), converted, block)
        self._absolute, self._noise, self._energy = (_Sums(count, width // block, most) for _ in range(3))
        self._rows, self._largest = list[slice](), list[float]()
        if positions is not None:
            self._moments: list[_Sums] = [_Sums(count, width // block, most) for _ in range(2)]
            self._bits = bits_of(candidate)
            self._top = np.zeros(count, dtype=np.int64)
            in_range = np.abs(of_reference.largest).max(initial=0.0) <= _EXP_IN_RANGE
            shift = torch.from_numpy(of_reference.largest).float()[:, None]
            self._shift = None if in_range else torch.split(shift, most)
            top = torch.from_numpy(of_reference.top)[:, None]
            self._of_top = candidate.gather(1, top).float().sub_(reference.gather(1, top).float())
            self._of_top_rows, self._of_top_size = torch.split(self._of_top, most), self._of_top.abs()[:, 0].numpy()

    @staticmethod
    def can_take(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
        """Whether these outputs, [rows, width] both, have enough values in a row that float32 holds."""
        return {reference.dtype, candidate.dtype} <= set(_IN_FLOAT32) and reference.shape[1] >= _FEWEST_VALUES

    def take(self, rows: slice) -> bool:
        """Compare some rows; False where they are not finite, or not close."""
        if not self._of_reference.finite[rows].all():
            return False
        chunk, length = rows.start // self._most, rows.stop - rows.start
        if length < self._buffers.length:
            self._buffers = self._buffers.of_fewer(length)
        buffers = self._buffers
        r, c = self._of_reference_rows[chunk], self._of_candidate_rows[chunk]
        delta, values = buffers.deltas, buffers.values
        if buffers.converted is not None:
            r = buffers.converted.copy_(r)
        delta.copy_(c)
        if self._positions is not None:
            self._top[rows] = self._bits[rows].argmax(-1)
        torch.linalg.vector_norm(buffers.delta_blocks, dim=-1, out=self._energy.of(chunk))
        delta.sub_(r)
        torch.abs(delta, out=values)
        largest = float(values.amax())
        if not _SMALLEST <= largest <= _LARGEST:
            return False
        count = 0
        if self._positions is not None:
            count = _moments_for(largest + float(self._of_top_size[rows].max()))
            if count > _MOST_MOMENTS:
                return False
        self._rows.append(rows)
        self._largest.append(largest)
        torch.sum(buffers.value_blocks, -1, out=self._absolute.of(chunk))
        torch.linalg.vector_norm(buffers.delta_blocks, dim=-1, out=self._noise.of(chunk))
        if count:
            self._take_moments(chunk, r, buffers, count)
        return True

    def _take_moments(self, chunk: int, r: torch.Tensor, buffers: _Buffers, count: int) -> None:
        """Of the δ of some rows, which are written over."""
        values, delta = buffers.values, buffers.deltas
        if self._shift is None:
            torch.exp(r, out=values)
        else:
            torch.sub(r, self._shift[chunk], out=values).exp_()
        delta.sub_(self._of_top_rows[chunk])
        while len(self._moments) < count:
            self._moments.append(self._absolute.alike())
        for of_order in self._moments[:count]:
            values.mul_(delta)
            torch.sum(buffers.value_blocks, -1, out=of_order.of(chunk))

    def finish(self) -> tuple[list[ElementSums], list[slice]]:
        """The sums of the rows that were taken, whose positions are added, and those of them that take more digits."""
        taken, left = list[ElementSums](), list[slice]()
        noises, energies, absolute = self._noise.squares(), self._energy.squares(), self._absolute.totals()
        exact = self._add_positions()
        for rows, largest in zip(self._rows, self._largest, strict=True):
            energy, energy_candidate = float(self._of_reference.energy[rows].sum()), float(energies[rows].sum())
            noise = float(noises[rows].sum())
            if not (exact[rows].all() and energy_candidate >= _CANCELLED * energy):
                left.append(rows)
                continue
            taken.append(
                ElementSums(
                    self._width * (rows.stop - rows.start), sum_abs=float(absolute[rows].sum()), max_abs=largest, noise=noise,
                    energy=energy, energy_candidate=energy_candidate, product=(energy + energy_candidate - noise) / 2,
                )
            )  # fmt: skip
        return taken, left

    def _add_positions(self) -> np.ndarray:
        """Add positions; whether those of each row are exact, [rows]."""
        exact: np.ndarray = np.ones(len(self._candidate), dtype=np.bool_)
        if self._positions is None or not self._rows:
            return exact
        shift = 0.0 if self._shift is None else self._of_reference.largest
        totals = np.exp(self._of_reference.log_total - shift)
        moments = np.stack([of_order.totals() for of_order in self._moments]) / totals
        log_growth = np.log1p(_ONE_OVER_FACTORIALS[: len(moments)] @ moments)
        kl = log_growth - moments[0]
        exact[moments[0] ** 2 > _MOST_CANCELLED * kl] = False
        log_ratio = self._of_top[:, 0].double().numpy() + log_growth
        same_top = self._likeliest() == self._of_reference.top
        for rows in self._rows:
            self._positions.add(rows, kl[rows], log_ratio[rows], same_top[rows])
        return exact

    def _likeliest(self) -> np.ndarray:
        """The first of the candidate's likeliest classes in each row that was taken, [rows]."""
        largest = logits_of(torch.from_numpy(self._top), self._candidate)
        for rows in self._rows:
            for row in rows.start + np.flatnonzero(largest[rows] <= 0):  # see `bits_of`
                self._top[row] = self._candidate[row].float().numpy().argmax()
        return self._top


class _Buffers:
    """What operations on some rows write over, [length, width] each, and views of it in blocks. converted: for the reference, where
    it is not in float32.
    """

    def __init__(self, deltas: torch.Tensor, values: torch.Tensor, converted: torch.Tensor | None, block: int) -> None:
        self.deltas, self.values, self.converted = deltas, values, converted
        self.length, self._block = len(deltas), block
        self.delta_blocks, self.value_blocks = (each.view(self.length, -1, block) for each in (deltas, values))

    def of_fewer(self, length: int) -> _Buffers:
        """The beginning of these."""
        converted = None if self.converted is None else self.converted[:length]
        return _Buffers(self.deltas[:length], self.values[:length], converted, self._block)


class _Sums:
    """A sum of each block of each row, float32, written some rows at a time; zero where nothing was."""

    def __init__(self, count: int, blocks: int, most: int) -> None:
        self._sums, self._most = torch.zeros(count, blocks), most
        self._chunks = torch.split(self._sums, most)

    def alike(self) -> _Sums:
        """Others of as many rows and blocks."""
        return _Sums(self._sums.shape[0], self._sums.shape[1], self._most)

    def of(self, chunk: int) -> torch.Tensor:
        """Those of one chunk's rows, to be written."""
        rows: torch.Tensor = self._chunks[chunk]
        return rows

    def totals(self) -> np.ndarray:
        """The sum of each row, float64 [rows]."""
        return self._sums.sum(-1, dtype=torch.float64).numpy()

    def squares(self) -> np.ndarray:
        """The sum of the squares of each row, float64 [rows]."""
        return self._sums.double().square_().sum(-1).numpy()


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
