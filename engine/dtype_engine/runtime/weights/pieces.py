"""Reads a weight some rows at a time, so that memory need not hold all of its values."""

from __future__ import annotations

import math
import threading

import torch

from dtype_engine.runtime.weights.source import CPU, WeightSource

_WORTH_KEEPING = 1 << 19
"""If at least this many values are always read together, such as those of an expert, the last ones read are kept, because the next
read often needs more of them.
"""


class Pieces:
    """A weight whose values are read only when a view of it, made by `reshape`, is sliced, or `elements` is called. Several
    threads may read at once.
    """

    device = CPU

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.shape, self.dtype = torch.Size(source.shape), source.dtype
        self._lock = threading.Lock()
        self._last: tuple[int, int, torch.Tensor] | None = None

    def numel(self) -> int:
        return self._source.numel()

    def reshape(self, *shape: int) -> Rows:
        """Return a view that can be sliced by rows, [rows, columns], or by elements if `shape` is one number."""
        return Rows(self, torch.Size(shape if len(shape) == 2 else (self.numel(),)))

    def elements(self, start: int, count: int) -> torch.Tensor:
        """Return `count` values, starting at the flat index `start`: [count]. Raises UserError if a file can't be read."""
        unit = self._source.unit
        if unit < _WORTH_KEEPING:
            return self._source.elements(start, count)
        first, last = start // unit, -(-(start + count) // unit)
        with self._lock:
            if self._last is None or self._last[:2] != (first, last):
                self._last = None  # frees its memory before the next piece is read
                self._last = first, last, self._source.elements(first * unit, (last - first) * unit)
            return self._last[2][start - first * unit :][:count]


class Rows:
    """A weight as a matrix or a flat tensor. Indexing it with a slice reads the rows or elements of this slice."""

    device = CPU

    def __init__(self, pieces: Pieces, shape: torch.Size) -> None:
        self._pieces = pieces
        self.shape = shape

    def __getitem__(self, piece: slice, /) -> torch.Tensor:
        start, stop, _ = piece.indices(self.shape[0])
        width = math.prod(self.shape[1:])
        found = self._pieces.elements(start * width, (stop - start) * width)
        return found.view(stop - start, *self.shape[1:])


def as_matrix(source: WeightSource) -> tuple[Rows, int]:
    """Return (a weight as a matrix whose columns are its last dimension, the number of rows that are always read together). A
    vector is one row.
    """
    columns = source.shape[-1] if source.shape else 1
    rows = math.prod(source.shape[:-1])
    return Pieces(source).reshape(rows, columns), max(1, source.unit // max(1, columns))
