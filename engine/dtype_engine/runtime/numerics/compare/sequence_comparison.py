"""One sequence's output against the reference's: sums over elements, and the figures of every position. What they mean: `metrics`.

Outputs go by in chunks of rows, so that no second copy of them is needed. On the CPU wide rows are compared in float32 by machine
code, and what that does not take, or takes more digits, in float64: there torch's threads share each operation, which writes over
buffers that stay in their caches.
"""

from __future__ import annotations

import math

import torch

from dtype_engine.runtime.formats.row_blocks import rows_in_cache
from dtype_engine.runtime.numerics.compare.element_sums import ElementSums
from dtype_engine.runtime.numerics.compare.position_figures import FinitePositions, PositionFigures
from dtype_engine.runtime.numerics.compare.reference_rows import ReferenceRows
from dtype_engine.runtime.numerics.compare.rows_in_float64 import RowsInFloat64
from dtype_engine.runtime.numerics.rows_in_float32 import RowsInFloat32


class SequenceComparison:
    """What one sequence gave: the sums of its chunks, and the figures of its positions where they have distributions.

    rows: how many positions it has. sums: over all its chunks; those over several sequences are taken chunk by chunk.
    """

    def __init__(self, rows: int, positions: PositionFigures | None) -> None:
        self.rows = rows
        self.positions = positions
        self.chunks: list[ElementSums] = []
        self.sums = ElementSums()

    def add(self, chunk: ElementSums) -> None:
        """Take in the sums of a chunk."""
        self.chunks.append(chunk)
        self.sums.add(chunk)


def compare_sequence(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    into: SequenceComparison,
    of_reference: ReferenceRows | None = None,
) -> None:
    """Compare two outputs, [rows, width] both, and take what comes of it `into` their sequence. of_reference: of that output, if it
    was worked out before.
    """
    if {reference.device.type, candidate.device.type} != {"cpu"}:
        for rows in rows_in_cache(reference.shape[0], reference.shape[1], on_cpu=False):
            into.add(_chunk_sums(reference[rows], candidate[rows], rows, into.positions))
        return
    if of_reference is None:
        of_reference = ReferenceRows(reference, into.positions is not None)
    with torch.no_grad():
        _compare_on_cpu(reference, candidate, into, of_reference)


def _compare_on_cpu(
    reference: torch.Tensor, candidate: torch.Tensor, into: SequenceComparison, of_reference: ReferenceRows
) -> None:
    """The same on the CPU, in memory that every chunk uses again."""
    count = reference.shape[0]
    positions = FinitePositions(count) if into.positions is not None else None
    in_float32: RowsInFloat32 | None = None
    if RowsInFloat32.can_take(reference, candidate):
        in_float32 = RowsInFloat32(reference, candidate, of_reference, positions)
    whole = in_float32.of(slice(0, count)) if in_float32 is not None else None
    if whole is not None:
        into.add(whole)
    else:
        _compare_in_pieces(reference, candidate, into, of_reference, positions, in_float32)
    if positions is not None and into.positions is not None:
        positions.fill(into.positions, reference, candidate, of_reference)


def _compare_in_pieces(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    into: SequenceComparison,
    of_reference: ReferenceRows,
    positions: FinitePositions | None,
    in_float32: RowsInFloat32 | None,
) -> None:
    """The same where not all rows are exact in float32."""
    count, width = reference.shape
    in_float64 = RowsInFloat64(reference, candidate, of_reference, positions)
    for several in rows_in_cache(count, width, 2):
        sums = in_float32.of(several) if in_float32 is not None else None
        if sums is not None:
            into.add(sums)
            continue
        for part in rows_in_cache(several.stop - several.start, width):
            rows = slice(several.start + part.start, several.start + part.stop)
            r, c = reference[rows], candidate[rows]
            if r.dtype == c.dtype and of_reference.finite[rows].all() and torch.equal(r, c):
                energy = float(of_reference.energy[rows].sum())
                into.add(ElementSums(r.numel(), energy=energy, energy_candidate=energy, product=energy))
                if positions is not None:
                    positions.add_equal(rows)
                continue
            wide = in_float64.compare(rows)
            into.add(_chunk_sums(r, c, rows, into.positions) if wide is None else wide)


def _chunk_sums(
    reference: torch.Tensor, candidate: torch.Tensor, rows: slice, positions: PositionFigures | None
) -> ElementSums:
    """The sums of some rows, whatever is in them, and the figures of their positions filled in."""
    r, c = _in_float64(reference, candidate)
    if positions is not None:
        positions.compare(rows, r, c)
    return _element_sums(r, c)


def _element_sums(r: torch.Tensor, c: torch.Tensor) -> ElementSums:
    """Of one chunk, in float64; `c` is `r` where they are equal."""
    equal = c is r
    r, c = r.reshape(-1), c.reshape(-1)
    sums = ElementSums(elements=r.numel())
    if equal and math.isfinite(energy := float(torch.dot(r, r))):
        sums.energy = sums.energy_candidate = sums.product = energy
        return sums
    delta = c - r
    noise = float(torch.dot(delta, delta))
    if not math.isfinite(noise):
        # Infinities that both have (masked logits) are no drift; where only one is not finite, all figures are.
        finite = torch.isfinite(r) & torch.isfinite(c)
        same = (r == c) | (torch.isnan(r) & torch.isnan(c))
        sums.nonfinite = int((~torch.isfinite(c) & ~same).sum())
        sums.nonfinite_reference = int((torch.isnan(r) | torch.isposinf(r)).sum())
        if bool((~finite & ~same).any()):
            sums.sum_abs = sums.max_abs = sums.noise = math.inf
        r, c = r[finite], c[finite]
        delta = c - r
        noise = float(torch.dot(delta, delta))
    sums.noise += noise
    sums.energy = float(torch.dot(r, r))
    sums.energy_candidate = float(torch.dot(c, c))
    sums.product = float(torch.dot(r, c))
    absolute = delta.abs_()
    sums.sum_abs += float(absolute.sum())
    sums.max_abs = max(sums.max_abs, float(absolute.max()) if absolute.numel() else 0.0)
    return sums


def _in_float64(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float64; the very same tensor twice where they are equal, which spares most of the arithmetic."""
    r = reference.double()
    equal = reference.dtype == candidate.dtype and torch.equal(reference, candidate)
    return r, r if equal else candidate.double()
