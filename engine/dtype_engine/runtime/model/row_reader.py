"""Reads one weight of a checkpoint some rows at a time, whether the files store plain values or codes."""

from __future__ import annotations

import math

import torch

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import matrices
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.runtime.model.mmap_reader import read_encoded, read_quantized, read_stored, torch_shape
from dtype_engine.runtime.model.pread_reader import FileValues
from dtype_engine.runtime.numerics.quantize import dequantize, torch_dtype


class RowReader:
    """Reads a weight as a matrix [rows, columns]. The weight's last dimension becomes the columns, and all other dimensions
    together become the rows. A vector is one row.

    Rows are read in the stored dtype, or in float32 for a weight that is stored as codes. Several threads may read at once.

    name: the weight's key in `checkpoint.weights`. Raises UserError if the values can't be read.
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._own = checkpoint.quantized.get(name)
        self._encoded = checkpoint.encoded.get(name)
        coded = self._own or self._encoded
        self._stored = None if coded is not None else checkpoint.weights[name]
        if self._stored is not None and self._stored.refusal is not None:
            raise UserError(f"{printable(name)} {self._stored.refusal}, so its values can't be read")
        shape = coded.shape if coded is not None else torch_shape(checkpoint.weights[name])
        self.shape = shape
        self.columns = shape[-1] if shape else 1
        self.rows = math.prod(shape[:-1])
        self.unit = self.rows // shape[0] if self._encoded is not None and len(shape) > 2 and shape[0] else 1
        """The number of rows that can only be decoded together. If every call of `read` starts and ends at a multiple of it, no row
        is decoded twice.
        """
        self.uses_threads = self._own is not None
        """True if `read` calls `parallel_map`, and so must not be called from one of its threads."""
        self._codes = read_quantized(self._own) if self._own is not None else None

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return the rows from `first` up to `last`: [rows, columns]. Raises UserError if the file can't be read."""
        if self._encoded is not None:
            return self._decoded(first, last)
        if self._own is not None:
            return self._dequantized(first, last)
        stored = self._stored
        assert stored is not None
        if (byte_range := stored.bytes) is None:
            whole = read_stored(self._checkpoint, stored)
            return whole.reshape(self.rows, self.columns)[first:last]
        with FileValues(byte_range, torch_dtype(stored.dtype), self.shape) as values:
            part = values.elements(first * self.columns, (last - first) * self.columns)
        return part.view(last - first, self.columns)

    def _decoded(self, first: int, last: int) -> torch.Tensor:
        """Return the rows from `first` up to `last` of a weight that another program quantized. If the weight has
        more than two dimensions, such as stacked experts [experts, out, in], the experts that contain the rows are decoded whole.
        """
        assert self._encoded is not None
        if len(self.shape) < 2:
            return read_encoded(self._encoded).reshape(1, -1)[first:last]
        unit = self.rows // self.shape[0]
        start = first // unit
        found = read_encoded(self._encoded, start, -(-last // unit)).reshape(-1, self.columns)
        return found[first - start * unit : last - start * unit]

    def _dequantized(self, first: int, last: int) -> torch.Tensor:
        """Return the rows from `first` up to `last` of a weight that this program exported with scales. Only the matrices and
        blocks that contain these rows are dequantized.
        """
        assert self._own is not None
        assert self._codes is not None
        codes, scale = self._codes
        blocks = dtypes.BY_NAME[self._own.dtype].blocks
        codes = codes.reshape(self.rows, self.columns)
        if blocks is None:
            if len(scale) == self.shape[0] > 1:  # one scale for each channel
                unit = self.rows // self.shape[0]
                scale = scale[torch.arange(first, last) // unit]
            return dequantize(codes[first:last], scale, torch.float32)
        count, height, _ = matrices(self.shape, blocks.columns)
        if count * height != self.rows or self.rows == 1:  # its blocks are made of other rows than those of the matrix
            values = dequantize(self._codes[0].reshape(self.shape), scale, torch.float32, blocks)
            return values.reshape(self.rows, self.columns)[first:last]
        down = -(-height // blocks.rows)
        pieces = []
        for matrix in range(first // height, -(-last // height)):
            begin, end = max(first - matrix * height, 0), min(last - matrix * height, height)
            start = begin // blocks.rows
            stop = -(-end // blocks.rows)
            taken = codes[matrix * height + start * blocks.rows : matrix * height + min(stop * blocks.rows, height)]
            values = dequantize(taken, scale[matrix * down + start : matrix * down + stop], torch.float32, blocks)
            pieces.append(values[begin - start * blocks.rows : end - start * blocks.rows])
        return torch.cat(pieces)
