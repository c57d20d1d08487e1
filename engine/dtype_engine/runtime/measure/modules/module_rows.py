"""Which rows of a module's output are kept of the reference's, to compare the candidate's with.

An output is taken as rows of its last dimension; for a language model a row is a token. Of an output with many rows a sample is
compared, since going over all that a model's modules give takes half as long again as the pass itself. The reference's energy
Σr² is known of every row, so the rows with the largest are always taken, as that of the first token mostly is. The others are
cut into strata in the order of their energies, of as many rows each, and the middle one of each is taken. What follows from them
for all rows: `row_comparison`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from ctypes import memmove
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

MOST_ROWS = 16
"""Rows of an output that are compared at least, where one or two sequences are all there is."""
FEWEST_ROWS = 8
"""Where modules are not compared in every sequence: what sequences differ is then most of a figure's error."""
_ROWS_OF_ALL = 32
_WIDTH = 512
"""Of outputs narrower than this as many more rows are compared."""
_CERTAIN = 4
"""One row in so many of a sample is one of those with the largest energy."""
_FEW = 64
"""Rows that are copied one by one, at most: up to so many it was seen to be faster."""
_MOST_TOGETHER = 1 << 20
"""Values that are compared in one go, at most."""


@dataclass(slots=True, eq=False)
class Pack:
    """What is kept of several outputs of one width, one after the other: they are compared in one go. rows: [rows, width], of each
    output as many as `sizes` say. energies and strata: those of the outputs, [outputs] and [2, rows].
    """

    rows: torch.Tensor
    sizes: list[int]
    energies: torch.Tensor
    strata: torch.Tensor


@dataclass(slots=True)
class KeptRows:
    """Copies of some rows of a reference output, or of all of them.

    rows: [kept, width], in float32 or float64. index: their places, None for all in their order. certain: how many of the first
    were taken for sure. total: how many rows the output has. energy: Σr² over all that is finite, float64 on the output's device.
    strata: [2, kept], float64: how many times ΣΔ² of each row counts, and the energy of what it stands for beside itself.
    pack, number: where the rows are, and the output's number there; None for too many to be compared in one go with others.
    places: `index`, where the rows are few and on the CPU.
    is_main: the pass returned this very output, which is compared in full.
    """

    shape: torch.Size
    rows: torch.Tensor
    index: torch.Tensor | None
    certain: int
    total: int
    energy: torch.Tensor = field(init=False)
    strata: torch.Tensor = field(init=False)
    pack: Pack | None = None
    number: int = 0
    places: list[int] | None = None
    is_main: bool = False

    def copy(self, output: torch.Tensor, into: torch.Tensor) -> None:
        """Copy the same rows of an output of this shape to [kept, width] of its dtype, contiguous.

        Right after a large product, when no code is in a cache any more, it takes 16 µs, and three of torch's operations 30 (Intel
        Xeon with AMX, 8 rows of 768 to 3,072 values).
        """
        if self.places is not None and type(output) is torch.Tensor and output.is_contiguous() and not output.is_neg():
            size = into.stride(0) * into.itemsize
            source, target = output.data_ptr(), into.data_ptr()
            for place in self.places:
                memmove(target, source + place * size, size)
                target += size
            return
        flat = as_rows(output)
        if self.index is None:
            into.copy_(flat)
        else:
            torch.index_select(flat, 0, self.index, out=into)

    def of(self, output: torch.Tensor) -> torch.Tensor:
        """The same rows of an output of this shape: a copy, or where all are taken perhaps the output itself."""
        flat = as_rows(output)
        return flat if self.index is None else flat.index_select(0, self.index)


def as_rows(output: torch.Tensor) -> torch.Tensor:
    """An output of any shape as [rows, width]."""
    return output.detach().reshape(math.prod(output.shape[:-1]), output.shape[-1] if output.ndim else 1)


def rows_each(compared: int, total: int) -> int:
    """How many rows of an output are compared at least in each of so many sequences, of so many in all: figures are of all that
    are compared together.
    """
    if compared < total:
        return FEWEST_ROWS
    return min(MOST_ROWS, max(FEWEST_ROWS, _ROWS_OF_ALL // max(1, total)))


def pack_of(together: Sequence[KeptRows]) -> Pack:
    """A copy of what is kept of some outputs of one width."""
    return Pack(
        torch.cat([kept.rows for kept in together]),
        [len(kept.rows) for kept in together],
        torch.stack([kept.energy for kept in together]),
        torch.cat([kept.strata for kept in together], 1),
    )


@dataclass(slots=True)
class _Unfinished:
    """norms: of all rows of the output. order: of the rows by their norms, None where all are kept."""

    kept: KeptRows
    norms: torch.Tensor
    order: torch.Tensor | None


class RowKeeper:
    """Takes copies of rows of reference outputs as these go by, all rows `in_full`, else at least `rows` of each. What can wait is
    done for many at once, by `finish`.
    """

    def __init__(self, in_full: bool, rows: int = MOST_ROWS) -> None:
        self._in_full = in_full
        self._rows = rows
        self._unfinished: dict[tuple[Any, ...], list[_Unfinished]] = {}
        """By what is alike."""
        self._widths: dict[tuple[int, torch.dtype, torch.device], list[KeptRows]] = {}
        """By the width of their rows: what will be in packs."""

    def keep(self, output: torch.Tensor) -> KeptRows:
        """What is kept of an output; `finish` fills in its energy and strata."""
        flat = as_rows(output)
        wide = torch.float64 if output.dtype == torch.float64 else torch.float32
        total, width = flat.shape
        count = max(self._rows, -(-self._rows * _WIDTH // max(1, width)))
        norms, ranked = _norms(flat, wide)
        if self._in_full or total <= count:
            copied = flat.to(wide, copy=True, memory_format=torch.contiguous_format)
            order, kept = None, KeptRows(output.shape, copied, None, total, total)
        else:
            certain = count // _CERTAIN
            order = ranked.argsort(descending=True)
            index = order.index_select(0, _places(total, count, certain, output.device))
            kept = KeptRows(output.shape, flat.index_select(0, index).to(wide), index, certain, total)
        alike = total, len(kept.rows), norms.dtype, output.device
        self._unfinished.setdefault(alike, []).append(_Unfinished(kept, norms, order))
        if kept.rows.numel() <= _MOST_TOGETHER:
            self._widths.setdefault((width, wide, output.device), []).append(kept)
        return kept

    def finish(self) -> None:
        """Fill in what is missing in all that is kept."""
        for unfinished in self._unfinished.values():
            first = unfinished[0].kept
            energies = torch.stack([each.norms for each in unfinished]).double().square()
            orders = [each.order for each in unfinished if each.order is not None]
            if orders:
                energies = energies.gather(1, torch.stack(orders))
            strata = _strata(energies, len(first.rows), first.certain)
            for each, energy, of_kept in zip(unfinished, energies.sum(1), strata, strict=True):
                each.kept.energy, each.kept.strata = energy, of_kept
        self._unfinished.clear()
        for alike in self._widths.values():
            for together in _in_packs([kept for kept in alike if not kept.is_main]):
                _pack(together)
        self._widths.clear()


def _in_packs(alike: list[KeptRows]) -> Iterator[list[KeptRows]]:
    """What is kept of outputs of one width, as many at a time as are compared in one go."""
    together, values = list[KeptRows](), 0
    for kept in alike:
        size = kept.rows.numel()
        if together and values + size > _MOST_TOGETHER:
            yield together
            together, values = [], 0
        together.append(kept)
        values += size
    if together:
        yield together


def _pack(together: list[KeptRows]) -> None:
    pack = pack_of(together)
    for number, (kept, rows) in enumerate(zip(together, torch.split(pack.rows, pack.sizes), strict=True)):
        kept.pack, kept.number, kept.rows = pack, number, rows
        if kept.index is not None and rows.device.type == "cpu" and len(rows) <= _FEW:
            kept.places = kept.index.tolist()


def _norms(flat: torch.Tensor, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of what is finite in each row, [rows], and the same to rank rows by: infinite where a value is not finite."""
    norms = torch.linalg.vector_norm(flat, dim=-1, dtype=wide)
    if flat.device.type == "cpu" and math.isfinite(float(norms.sum())):
        return norms, norms
    # Values that are not finite, or squares beyond float32; elsewhere than on the CPU asking takes longer than this.
    norms = torch.linalg.vector_norm(torch.nan_to_num(flat.double(), 0.0, 0.0, 0.0), dim=-1)
    return norms, torch.where(torch.isfinite(flat).all(-1), norms, math.inf)


def _strata(energies: torch.Tensor, count: int, certain: int) -> torch.Tensor:
    """`strata` of outputs of which `count` rows are kept, [outputs, 2, count], by their rows' energies, float64 [outputs, rows],
    ranked where not all are kept.
    """
    strata = energies.new_zeros(len(energies), 2, count)
    strata[:, 0] = 1.0
    if certain < count:
        bounds, middles = strata_of(energies.shape[1], count, certain, energies.device)
        below = torch.cat([energies.new_zeros(len(energies), 1), energies.cumsum(1)], 1)[:, bounds]
        of_strata, of_rows = below.diff(dim=1), energies[:, middles]
        strata[:, 0, certain:] = torch.where(of_rows > 0, of_strata / of_rows, bounds.diff().double())
        strata[:, 1, certain:] = of_strata
    return strata


@lru_cache(maxsize=64)
def _places(total: int, count: int, certain: int, device: torch.device) -> torch.Tensor:
    """The ranks of the rows that are kept, [count]."""
    _, middles = strata_of(total, count, certain, device)
    return torch.cat([torch.arange(certain, device=device), middles])


@lru_cache(maxsize=64)
def strata_of(total: int, count: int, certain: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `total` ranked rows, those after the first `certain`: where each stratum begins, [strata + 1], and its row, [strata]."""
    strata = count - certain
    bounds = certain + (torch.arange(strata + 1) * (total - certain)) // strata
    return bounds.to(device), ((bounds[:-1] + bounds[1:]) // 2).to(device)
