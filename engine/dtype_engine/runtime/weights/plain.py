"""A weight that is stored as plain values."""

from __future__ import annotations

import torch
from torch.nn import functional

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
    def nbytes(self) -> int:  # type: ignore[override]
        return self._tensor.nbytes

    def held(self, device: torch.device) -> torch.Tensor:
        return self._tensor.to(device)

    def read(self, device: torch.device = CPU) -> torch.Tensor:
        return self.held(device)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        table = self._tensor  # if it is in a file, only its rows go to the accelerator
        return functional.embedding(ids.to(table.device), table).to(ids.device)
