"""A tensor's values in a file, read a piece at a time and never mapped.

A mapped file that another program cuts short ends this one with a signal (SIGBUS); a failed read is an error with a message.
"""

from __future__ import annotations

import math
import os
from types import TracebackType

import torch

from dtype_engine.checkpoint import ByteRange
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import reading


class FileValues:
    """The values of one tensor, flat or as rows, while the block that opens it runs."""

    device = torch.device("cpu")

    def __init__(self, byte_range: ByteRange, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.byte_range = byte_range
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self._file = -1

    def __enter__(self) -> FileValues:
        with reading(self.byte_range.file):
            self._file = os.open(self.byte_range.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def numel(self) -> int:
        return math.prod(self.shape)

    def elements(self, start: int, count: int) -> torch.Tensor:
        """`count` elements from the flat index `start` on. Raises UserError where the file ends before them, or can't be read."""
        width = self.dtype.itemsize
        buffer = bytearray(count * width)
        view, at = memoryview(buffer), self.byte_range.start + start * width
        while view:
            with reading(self.byte_range.file):
                got = _read_into(self._file, view, at)
            if not got:
                raise UserError(f"{self.byte_range.file} was cut short while it was read")
            view, at = view[got:], at + got
        return torch.frombuffer(buffer, dtype=self.dtype) if count else torch.empty(0, dtype=self.dtype)

    def reshape(self, *shape: int) -> FileRows:
        """The same as [rows, columns], or flat for one number."""
        return FileRows(self, torch.Size(shape if len(shape) == 2 else (self.numel(),)))


class FileRows:
    """A matrix or a flat tensor in a file, of which slices of whole rows or of elements are read."""

    device = torch.device("cpu")

    def __init__(self, values: FileValues, shape: torch.Size) -> None:
        self._values = values
        self.shape = shape

    def __getitem__(self, piece: slice, /) -> torch.Tensor:
        start, stop, _ = piece.indices(self.shape[0])
        width = math.prod(self.shape[1:])
        return self._values.elements(start * width, (stop - start) * width).view(stop - start, *self.shape[1:])


def _read_into(file: int, view: memoryview, at: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(file, [view], at)
    data = os.pread(file, len(view), at)
    view[: len(data)] = data
    return len(data)
