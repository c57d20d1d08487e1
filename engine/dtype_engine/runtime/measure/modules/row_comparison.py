"""How far rows of a candidate's outputs are from those kept of the reference's, and what follows for all rows.

With E the energy Σr² of a stratum and ρ = ΣΔ² / Σr² that of its row, ΣΔ² of the stratum is E ρ (a ratio estimate; Cochran, Sampling
Techniques, 3rd edition, 6.2). Its variance is E² (1 - 1/n) S², n the rows of the stratum. One row has no S² of its own: it is the
mean of (ρ_i - ρ_{i+1})² / 2 beside its neighbours (Cochran 5A.12, collapsed strata), and since few rows may be alike by chance, of
what is stated beforehand with the weight of three rows: that rows differ by half of their mean. Where a few rows carry most of ΣΔ²
and not of Σr², two errors hold less often than nineteen times in twenty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from dtype_engine.runtime.formats.row_blocks import parallel_map
from dtype_engine.runtime.measure.modules.module_rows import KeptRows, Pack, pack_of, strata_of

_PRIOR_FREEDOM = 3
_PRIOR_SPREAD = 0.5
_IN_CACHE = 1 << 17
"""Values that stay in a core's cache while torch goes over them."""
_ON_DEVICE = 1 << 22
"""Values of which a GPU holds the differences at a time."""
_MOST_WAITING_BYTES = 1 << 25
"""Of rows that wait to be compared: those of a model with 300 modules of a width of 1,000 are half of it."""


@dataclass(slots=True)
class ModuleSums:
    """One module over all its calls so far: Σr² and ΣΔ², the largest |Δ|, and values that only the candidate has not finite.

    variance: that of ΣΔ², 0.0 where every row was compared; the last two are of the rows that were.
    """

    energy: float = 0.0
    noise: float = 0.0
    max_abs: float = 0.0
    nonfinite: int = 0
    comparable: bool = True
    variance: float = 0.0

    def add(self, other: ModuleSums) -> None:
        """Take in the sums of further calls."""
        self.energy += other.energy
        self.noise += other.noise
        self.max_abs = max(self.max_abs, other.max_abs)
        self.nonfinite += other.nonfinite
        self.comparable = self.comparable and other.comparable
        self.variance += other.variance


@dataclass(slots=True)
class _Summed:
    """Outputs whose rows are summed: their norms and largest |Δ|, one after another, and what is known of the reference's."""

    outputs: list[tuple[KeptRows, ModuleSums]]
    norms: torch.Tensor
    peaks: torch.Tensor
    energies: torch.Tensor
    strata: torch.Tensor


class _Candidates:
    """The candidate's rows, copied beside those of a pack. dtype: theirs."""

    def __init__(self, pack: Pack, dtype: torch.dtype) -> None:
        self.rows = torch.empty_like(pack.rows, dtype=dtype)
        self._pack = pack
        self._each = torch.split(self.rows, pack.sizes)
        self._taken: dict[int, tuple[KeptRows, ModuleSums]] = {}
        """By their number in the pack."""

    def take(self, kept: KeptRows, output: torch.Tensor, sums: ModuleSums) -> bool:
        """Copy the rows of an output; False where those of another were, which has the same rows kept of the reference."""
        number = kept.number
        if number in self._taken:
            return False
        self._taken[number] = kept, sums
        kept.copy(output, self._each[number])
        return True

    def sum(self) -> _Summed:
        """Sum the rows of all that was taken."""
        numbers = sorted(self._taken)
        outputs = [self._taken[number] for number in numbers]
        candidate, pack = self.rows, self._pack
        if len(numbers) < len(pack.sizes):
            candidate = torch.cat([self._each[number] for number in numbers])
            pack = pack_of([kept for kept, _ in outputs])
        norms, peaks = _norms_and_peaks(pack.rows, candidate)
        if not math.isfinite(float(norms.sum())):
            start = 0
            for number, (kept, sums) in enumerate(outputs):
                rows = slice(start, start := start + len(kept.rows))
                if not math.isfinite(float(norms[rows].sum())):
                    sums.add(_not_finite(kept, candidate[rows].to(pack.rows.dtype) - pack.rows[rows]))
                    outputs[number] = kept, ModuleSums()  # it is filled in
        return _Summed(outputs, norms, peaks, pack.energies, pack.strata)


class RowComparison:
    """Compares outputs with the rows kept of them, as these go by.

    The rows of an output are copied at once, and compared when the pass is over, or when many wait: right after a large product the
    code for that is in no cache any more, and takes four times as long. The results leave the device in one piece.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, torch.dtype], _Candidates] = {}
        """By the `id` of a pack, and the dtype of the candidate's rows."""
        self._nbytes = 0
        self._summed: list[_Summed] = []

    def add(self, kept: KeptRows, output: torch.Tensor, sums: ModuleSums, alone: bool = False) -> None:
        """Take in one output as it is now; `finish` fills in its `sums`, which are empty. alone: there will be no others."""
        if output.shape != kept.shape:
            # Experts see other tokens when the routing changes: there is nothing to compare element by element.
            sums.comparable = False
            return
        if not alone and kept.pack is not None:
            beside = self._waiting.get((id(kept.pack), output.dtype)) or self._beside(kept.pack, output.dtype)
            if beside.take(kept, output, sums):
                return
        self._summed.append(_sum_alone(kept, sums, kept.of(output)))

    def _beside(self, pack: Pack, dtype: torch.dtype) -> _Candidates:
        """Where rows of this dtype are copied beside those of a pack, from now on."""
        if self._nbytes > _MOST_WAITING_BYTES:
            self._compare()
        beside = self._waiting[id(pack), dtype] = _Candidates(pack, dtype)
        self._nbytes += beside.rows.nbytes
        return beside

    def _compare(self) -> None:
        """Compare all that waits."""
        self._summed += [candidates.sum() for candidates in self._waiting.values()]
        self._waiting.clear()
        self._nbytes = 0

    def finish(self) -> None:
        """Fill in the sums of all that was taken in."""
        self._compare()
        if not self._summed:
            return
        outputs = [output for summed in self._summed for output in summed.outputs]
        sizes = [kept.rows.shape[0] for kept, _ in outputs]
        of_rows = sum(sizes)
        norms = torch.cat([summed.norms.double() for summed in self._summed])
        peaks = torch.cat([summed.peaks.double() for summed in self._summed])
        plans = torch.cat([summed.strata for summed in self._summed], 1).reshape(-1)
        energies = torch.cat([summed.energies for summed in self._summed])
        # All leaves the device at once: whoever asks it for a number waits for it.
        told = torch.cat([norms, peaks, plans, energies]).cpu()
        norms, peaks, plans, energies = torch.split(told, [of_rows, of_rows, 2 * of_rows, len(outputs)])
        self._summed.clear()
        kinds: dict[tuple[int, int, int], list[int]] = {}
        for number, (kept, _) in enumerate(outputs):
            kinds.setdefault((kept.rows.shape[0], kept.certain, kept.total), []).append(number)
        of_all, starts = torch.stack([norms.square(), peaks, *plans.view(2, of_rows)]), [0, *accumulate(sizes)]
        for (rows, certain, total), numbers in kinds.items():
            places = torch.tensor([starts[number] for number in numbers])[:, None] + torch.arange(rows)
            noise, largest, times, stands_for = of_all[:, places]
            totals, variances = estimated_total(noise, torch.stack([times, stands_for], 1), certain, total)
            most = largest.amax(-1) if rows else torch.zeros(len(numbers))
            figures = (energies[numbers], totals, variances, most)
            for number, *of_one in zip(numbers, *(figure.tolist() for figure in figures), strict=True):
                energy, noise_sum, variance, peak = of_one
                outputs[number][1].add(ModuleSums(energy, noise_sum, peak, variance=variance))


def _norms_and_peaks(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """‖Δ‖ and the largest |Δ| of each row of [rows, width]."""
    count, width = reference.shape
    on_cpu = reference.device.type == "cpu"
    norms, peaks = reference.new_empty(count), reference.new_empty(count)
    step = max(1, (_IN_CACHE if on_cpu else _ON_DEVICE) // max(1, width))
    pieces = -(-count // step)

    def work(numbers: range) -> None:
        with torch.no_grad():
            for number in numbers:
                rows = slice(number * step, (number + 1) * step)
                deltas = candidate[rows].to(reference.dtype, copy=True).sub_(reference[rows])
                norms[rows] = torch.linalg.vector_norm(deltas, dim=-1)
                peaks[rows] = _largest(deltas)

    if on_cpu:
        parallel_map(work, pieces)
    else:
        work(range(pieces))
    return norms, peaks


def _largest(deltas: torch.Tensor) -> torch.Tensor:
    """The largest |Δ| of each row of [rows, width], which is overwritten."""
    return deltas.abs_().amax(-1) if deltas.shape[1] else deltas.new_zeros(len(deltas))


def _sum_alone(kept: KeptRows, sums: ModuleSums, rows: torch.Tensor) -> _Summed:
    """Sum the rows of one output."""
    norms, peaks = _norms_and_peaks(kept.rows, rows)
    if not math.isfinite(float(norms.sum())):
        sums.add(_not_finite(kept, rows.double() - kept.rows.double()))
        sums = ModuleSums()
    return _Summed([(kept, sums)], norms, peaks, kept.energy[None], kept.strata)


def estimated_total(
    values: torch.Tensor, strata: torch.Tensor, certain: int, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over `total` rows of each output and its variance, [outputs] both, of the values of some, float64 [outputs, rows],
    and their `strata`, [outputs, 2, rows], of which the first `certain` are rows that stand for themselves alone.
    """
    counted = values * strata[:, 0]
    if certain == values.shape[1]:
        return counted.sum(-1), counted.new_zeros(len(counted))
    energies = strata[:, 1, certain:]
    ratios = torch.where(energies > 0, counted[:, certain:] / energies, 0.0)
    squares = ratios.diff(dim=-1).square() / 2
    first, last = squares[:, :1], squares[:, -1:]
    spread = (torch.cat([first, squares], -1) + torch.cat([squares, last], -1)) / 2
    shares = energies / energies.sum(-1, keepdim=True).clamp(min=1e-300)
    mean = (shares * ratios).sum(-1, keepdim=True)
    taken = values.shape[1] - certain
    spread = (taken * spread + _PRIOR_FREEDOM * (_PRIOR_SPREAD * mean) ** 2) / (taken + _PRIOR_FREEDOM)
    bounds, _ = strata_of(total, values.shape[1], certain, values.device)
    unseen = 1 - 1 / bounds.diff()
    return counted.sum(-1), (energies.square() * unseen * spread).sum(-1)


def _not_finite(kept: KeptRows, delta: torch.Tensor) -> ModuleSums:
    """The sums of an output where some Δ² is not finite, of Δ [rows, width]: too large for float32, or a value on one side or both
    is not. A Δ that float32 does not hold, of values that it does, counts as a value that is not finite.
    """
    delta = delta.double()
    nonfinite = int((torch.isfinite(kept.rows) & ~torch.isfinite(delta)).sum())
    if nonfinite:
        return ModuleSums(float(kept.energy), math.inf, math.inf, nonfinite)
    both = torch.isfinite(delta)
    if not bool(both.any()):
        return ModuleSums(comparable=False)  # nothing is finite on either side: that is no agreement
    delta = torch.where(both, delta, 0.0)
    of_rows = delta.square().sum(-1)[None].cpu()
    total, variance = estimated_total(of_rows, kept.strata.cpu()[None], kept.certain, kept.total)
    return ModuleSums(float(kept.energy), float(total), float(delta.abs().max()), variance=float(variance))
