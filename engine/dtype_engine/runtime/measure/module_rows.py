"""Rows of module outputs: which are kept of the reference's, and how far the candidate's are from them.

An output is taken as rows of its last dimension; for a language model a row is a token. Of an output with many rows a sample is
compared, since going over all that a model's modules give takes half as long again as the pass itself. The reference's energy
Σr² is known of every row, so the rows with the largest are always taken, as that of the first token mostly is. The others are
cut into strata in the order of their energies, of as many rows each, and the middle one of each is taken: with E the energy of a
stratum and ρ = ΣΔ² / Σr² that of its row, ΣΔ² of the stratum is E ρ (a ratio estimate; Cochran, Sampling Techniques, 3rd edition,
6.2). Its variance is E² (1 - 1/n) S², n the rows of the stratum. One row has no S² of its own: it is the mean of
(ρ_i - ρ_{i+1})² / 2 beside its neighbours (Cochran 5A.12, collapsed strata), and since few rows may be alike by chance, of what is
stated beforehand with the weight of three rows: that rows differ by half of their mean. Where a few rows carry most of ΣΔ² and not
of Σr², two errors hold less often than nineteen times in twenty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from dtype_engine.runtime.chunks import parallel_map

ROWS = 16
"""Rows of an output that are compared at least."""
_ELEMENTS = 1 << 13
"""Elements of it at least: narrow outputs have more rows compared."""
_CERTAIN = 4
"""One row in so many of a sample is one of those with the largest energy."""
_PRIOR_FREEDOM = 3
_PRIOR_SPREAD = 0.5
_PIECE = 1 << 18
"""Elements that are compared at a time: a float32 MiB stays in a processor's cache."""


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
class KeptRows:
    """Copies of some rows of a reference output, or of all of them.

    rows: [kept, width], in float32 or float64. index: their places, None for all in their order. certain: how many of the first
    were taken for sure. total: how many rows the output has. energy: Σr² over all that is finite, float64 on the output's device.
    strata: [2, kept], float64: how many times ΣΔ² of each row counts, and the energy of what it stands for beside itself.
    """

    shape: torch.Size
    rows: torch.Tensor
    index: torch.Tensor | None
    certain: int
    total: int
    energy: torch.Tensor
    strata: torch.Tensor

    def of(self, output: torch.Tensor) -> torch.Tensor:
        """The same rows of an output of this shape: a copy, or where all are taken perhaps the output itself."""
        flat = as_rows(output)
        return flat if self.index is None else flat.index_select(0, self.index)


def as_rows(output: torch.Tensor) -> torch.Tensor:
    """An output of any shape as [rows, width]."""
    return output.detach().reshape(-1, output.shape[-1] if output.ndim else 1)


def keep_rows(output: torch.Tensor, in_full: bool) -> KeptRows:
    """What is kept of a reference output to compare others with: copies of rows."""
    flat = as_rows(output)
    wide = torch.float64 if output.dtype == torch.float64 else torch.float32
    total, width = flat.shape
    count = max(ROWS, -(-_ELEMENTS // max(1, width)))
    norms = torch.linalg.vector_norm(flat, dim=-1, dtype=wide).double()
    if output.device.type != "cpu" or not math.isfinite(float(norms.sum())):
        # Values that are not finite, or squares beyond float32; elsewhere than on the CPU asking takes longer than this.
        finite = torch.nan_to_num(flat.double(), 0.0, 0.0, 0.0)
        bad = ~torch.isfinite(flat).all(-1)
        norms = torch.linalg.vector_norm(finite, dim=-1)
        ranked = torch.where(bad, math.inf, norms)
    else:
        ranked = norms
    energy = norms.square().sum()
    if in_full or total <= count:
        copied = flat.to(wide, copy=True, memory_format=torch.contiguous_format)
        strata = torch.zeros(2, total, dtype=torch.float64, device=output.device)
        strata[0] = 1.0
        return KeptRows(output.shape, copied, None, total, total, energy, strata)
    certain = count // _CERTAIN
    order = ranked.argsort(descending=True)
    bounds, middles = _strata(total, count, certain, output.device)
    energies = norms.square()[order]
    below = torch.cat([energies.new_zeros(1), energies.cumsum(0)])[bounds]
    of_strata, of_rows = below.diff(), energies[middles]
    strata = torch.zeros(2, count, dtype=torch.float64, device=output.device)
    strata[0] = 1.0
    strata[0, certain:] = torch.where(of_rows > 0, of_strata / of_rows, bounds.diff().double())
    strata[1, certain:] = of_strata
    index = torch.cat([order[:certain], order[middles]])
    return KeptRows(output.shape, flat.index_select(0, index).to(wide), index, certain, total, energy, strata)


@lru_cache(maxsize=64)
def _strata(total: int, count: int, certain: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `total` ranked rows, those after the first `certain`: where each stratum begins, [strata + 1], and its row, [strata]."""
    strata = count - certain
    bounds = certain + (torch.arange(strata + 1) * (total - certain)) // strata
    return bounds.to(device), ((bounds[:-1] + bounds[1:]) // 2).to(device)


@dataclass(slots=True)
class Pending:
    """Rows of a candidate's output that wait to be compared with those kept of the reference's; `sums` is filled in then."""

    kept: KeptRows
    rows: torch.Tensor
    sums: ModuleSums


def compare_rows(pending: Iterable[Pending]) -> None:
    """Compare all, rows of the same kind at once, and fill in their sums. The results leave the device in one piece."""
    groups: dict[tuple[object, ...], list[Pending]] = {}
    for each in pending:
        kept, rows = each.kept, each.rows
        key = (kept.rows.shape, kept.certain, kept.total, kept.rows.dtype, rows.dtype, rows.device)
        groups.setdefault(key, []).append(each)
    pieces: list[list[Pending]] = []
    for group in groups.values():
        at_once = max(1, _PIECE // max(1, group[0].rows.numel()))
        pieces += [group[start : start + at_once] for start in range(0, len(group), at_once)]
    found = [torch.empty(0)] * len(pieces)

    def work(numbers: range) -> None:
        for number in numbers:
            found[number] = _row_errors(pieces[number])

    if pieces and pieces[0][0].rows.device.type == "cpu":
        with torch.no_grad():
            parallel_map(work, len(pieces))
    else:
        work(range(len(pieces)))
    if found:
        told = torch.cat(found).cpu()  # of all at once: whoever asks a device for a number waits for it
        for piece, of_piece in zip(pieces, torch.split(told, [len(each) for each in found]), strict=True):
            _fill_in(piece, of_piece)


def _row_errors(piece: Sequence[Pending]) -> torch.Tensor:
    """ΣΔ² of each row, the largest |Δ| of each, their strata, and Σr² of each whole output; float64 [4 x rows + outputs]."""
    wide = piece[0].kept.rows.dtype
    if len(piece) > 1:
        delta = torch.cat([each.rows for each in piece]).to(wide).sub_(torch.cat([each.kept.rows for each in piece]))
        errors = _errors(delta)
    else:
        rows, kept = piece[0].rows, piece[0].kept.rows
        step = max(1, _PIECE // max(1, rows.shape[1]))
        parts = zip(torch.split(rows, step), torch.split(kept, step), strict=True)
        errors = [
            torch.cat(part) for part in zip(*(_errors(c.to(wide, copy=True).sub_(r)) for c, r in parts), strict=True)
        ]
    plans = [each.kept.strata.reshape(-1) for each in piece]
    return torch.cat([*errors, *plans, torch.stack([each.kept.energy for each in piece])])


def _errors(delta: torch.Tensor) -> list[torch.Tensor]:
    """Σ and the largest |Δ| of each row of Δ, which is overwritten; float64."""
    noise = torch.linalg.vector_norm(delta, dim=-1).double().square()
    if not delta.shape[1]:
        return [noise, noise]
    return [noise, delta.abs_().amax(-1).double()]


def _fill_in(piece: Sequence[Pending], found: torch.Tensor) -> None:
    """The sums of outputs of one kind, of what `_row_errors` gave of them."""
    count, kept = len(piece), piece[0].kept
    rows = kept.rows.shape[0]
    noise, peaks, plans, energies = torch.split(found, [count * rows, count * rows, 2 * count * rows, count])
    strata = plans.view(count, 2, rows)
    totals, variances = estimated_total(noise.view(count, rows), strata, kept.certain, kept.total)
    largest = peaks.view(count, rows).amax(-1) if rows else energies.new_zeros(count)
    readings = zip(piece, energies.tolist(), totals.tolist(), variances.tolist(), largest.tolist(), strict=True)
    for each, energy, total, variance, peak in readings:
        if math.isfinite(total):
            each.sums.add(ModuleSums(energy, total, peak, variance=variance))
        else:
            each.sums.add(_not_finite(each, energy))


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
    bounds, _ = _strata(total, values.shape[1], certain, values.device)
    unseen = 1 - 1 / bounds.diff()
    return counted.sum(-1), (energies.square() * unseen * spread).sum(-1)


def _not_finite(one: Pending, energy: float) -> ModuleSums:
    """The sums of an output where some Δ² is not finite: too large for float32, or a value on one side or both is not."""
    kept, rows = one.kept, one.rows
    delta = rows.double() - kept.rows.double()
    nonfinite = int((torch.isfinite(kept.rows) & ~torch.isfinite(rows)).sum())
    if nonfinite:
        return ModuleSums(energy, math.inf, math.inf, nonfinite)
    both = torch.isfinite(delta)
    if not bool(both.any()):
        return ModuleSums(comparable=False)  # nothing is finite on either side: that is no agreement
    delta = torch.where(both, delta, 0.0)
    of_rows = delta.square().sum(-1)[None].cpu()
    total, variance = estimated_total(of_rows, kept.strata.cpu()[None], kept.certain, kept.total)
    return ModuleSums(energy, float(total), float(delta.abs().max()), variance=float(variance))
