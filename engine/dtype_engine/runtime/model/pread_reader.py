"""Reads some values of a tensor at a time from a file, without memory-mapping the file.

If another program truncates a file while it is memory-mapped, a signal (SIGBUS) ends this process. Without a mapping, the read only
raises an error.
"""

from __future__ import annotations

import math
from io import FileIO
from types import TracebackType
from typing import Protocol

import torch

from dtype_engine.checkpoint import ByteRange
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import reading


class Elements(Protocol):
    """The interface of a tensor, for example in a file, of which any range of values can be read."""

    def elements(self, start: int, count: int) -> torch.Tensor:
        """Return `count` elements, starting at the flat index `start`: [count]."""


class FileValues:
    """Reads the values of one tensor in a file, by flat index or by rows. This context manager opens and closes the file."""

    device = torch.device("cpu")

    def __init__(self, byte_range: ByteRange, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.byte_range = byte_range
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self._file: FileIO

    def __enter__(self) -> FileValues:
        with reading(self.byte_range.file):
            self._file = open(self.byte_range.file, "rb", buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def numel(self) -> int:
        return math.prod(self.shape)

    def elements(self, start: int, count: int) -> torch.Tensor:
        """Read `count` elements, starting at the flat index `start`: [count]. Raises UserError if the file is too short or can't be
        read.
        """
        width = self.dtype.itemsize
        buffer = bytearray(count * width)
        view = memoryview(buffer)
        with reading(self.byte_range.file):
            self._file.seek(self.byte_range.start + start * width)
            while view:
                got = self._file.readinto(view)
                if not got:
                    raise UserError(f"{self.byte_range.file} was cut short while it was read")
                view = view[got:]
        return torch.frombuffer(buffer, dtype=self.dtype) if count else torch.empty(0, dtype=self.dtype)

    def reshape(self, *shape: int) -> FileRows:
        """Return a view that can be sliced by rows, [rows, columns], or by elements if `shape` is only one number."""
        return FileRows(self, torch.Size(shape if len(shape) == 2 else (self.numel(),)))


class FileRows:
    """A matrix or a flat tensor in a file. Indexing it with a slice reads the rows or elements of this slice."""

    device = torch.device("cpu")

    def __init__(self, values: Elements, shape: torch.Size) -> None:
        self._values = values
        self.shape = shape

    def __getitem__(self, piece: slice, /) -> torch.Tensor:
        start, stop, _ = piece.indices(self.shape[0])
        width = math.prod(self.shape[1:])
        return self._values.elements(start * width, (stop - start) * width).view(stop - start, *self.shape[1:])
