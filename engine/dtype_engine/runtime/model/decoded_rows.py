"""Decodes a weight that another program quantized. Only the values that are read are decoded, so memory need not hold
all of them.
"""

from __future__ import annotations

import math
import threading

import torch

from dtype_engine.checkpoint.schemes import EncodedWeight
from dtype_engine.runtime.model.mmap_reader import read_encoded
from dtype_engine.runtime.model.pread_reader import FileRows

_WORTH_KEEPING = 1 << 19
"""The values that were decoded last are kept if each index of the weight's first dimension has at least this many values. Such an
index is, for example, an expert, which is decoded as a whole. The next read often needs values of the same expert.
"""


class DecodedValues:
    """The float32 values of a weight that another program quantized, readable by flat index or as rows. A read decodes only those
    indexes of the weight's first dimension that it needs.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, weight: EncodedWeight) -> None:
        self.weight = weight
        self.shape = torch.Size(weight.shape)
        self._unit = math.prod(weight.shape[1:])
        self._lock = threading.Lock()
        self._last: tuple[int, int, torch.Tensor] | None = None

    def numel(self) -> int:
        return math.prod(self.shape)

    def elements(self, start: int, count: int) -> torch.Tensor:
        """Return `count` values, starting at the flat index `start`: float32 [count]. Raises UserError if a file can't be read."""
        if not count:
            return torch.empty(0)
        first, last = start // self._unit, -(-(start + count) // self._unit)
        return self._decoded(first, last).reshape(-1)[start - first * self._unit :][:count]

    def _decoded(self, first: int, last: int) -> torch.Tensor:
        if self._unit < _WORTH_KEEPING:
            return read_encoded(self.weight, first, last)
        with self._lock:
            if self._last is None or self._last[:2] != (first, last):
                self._last = None  # frees its memory before the next piece is decoded
                self._last = first, last, read_encoded(self.weight, first, last)
            return self._last[2]

    def reshape(self, *shape: int) -> FileRows:
        """Return a view that can be sliced by rows, [rows, columns], or by elements if `shape` is only one number."""
        return FileRows(self, torch.Size(shape if len(shape) == 2 else (self.numel(),)))
