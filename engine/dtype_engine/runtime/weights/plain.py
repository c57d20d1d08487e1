"""A weight that is stored as plain values."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from dtype_engine.checkpoint import CheckpointTensor
from dtype_engine.runtime.device import copied_to
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.weights.files import read_mapped, read_range, torch_shape
from dtype_engine.runtime.weights.source import CPU, WeightSource


class PlainSource(WeightSource):
    """A weight of plain values that stay in memory, usually memory-mapped from a file. Reading it copies nothing, unless it moves
    the values to another device.
    """

    plain = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape, self.dtype, self.holds = tuple(tensor.shape), tensor.dtype, tensor.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._tensor,)

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def held(self, device: torch.device) -> torch.Tensor:
        return self._tensor.to(device)

    def read(self, device: torch.device = CPU) -> torch.Tensor:
        return self.held(device)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        table = self._tensor  # if it is in a file, only its rows go to the accelerator
        return functional.embedding(ids.to(table.device), table).to(ids.device)


class FileSource(WeightSource):
    """A weight of plain values that stay in their file, and are read from it at each use.

    how: "mapped" maps the file for each use, so that an operation reads the pages that it needs. "copied" copies the values to
    memory, for a file that may change meanwhile.
    """

    def __init__(self, stored: CheckpointTensor, how: Literal["mapped", "copied"]) -> None:
        self._stored, self._how = stored, how
        self.in_files = (stored,)
        self.shape, self.dtype = torch_shape(stored), torch_dtype(stored.dtype)
        self.holds, self.has_parts = self.dtype, len(stored.shape) > 2

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.read(),)

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes

    def read(self, device: torch.device = CPU) -> torch.Tensor:
        if self._how == "copied":
            return self.elements(0, self.numel()).view(self.shape).to(device)
        return copied_to(read_mapped(self._stored), device)

    def elements(self, start: int, count: int) -> torch.Tensor:
        if self._how == "mapped" or (byte_range := self._stored.bytes) is None:
            return super().elements(start, count)
        return read_range(byte_range, self.dtype, start, count)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids.cpu(), self.read()).to(ids.device)

    def part(self, index: int, device: torch.device) -> torch.Tensor | None:
        return self.read()[index].to(device) if self.has_parts and 0 <= index < self.shape[0] else None
