"""A weight of a model that is larger than memory and runs block by block."""

from __future__ import annotations

import torch

from dtype_engine.runtime.numerics.activations import InputFormat
from dtype_engine.runtime.weights.budget import MOST_KEPT, MemoryBudget
from dtype_engine.runtime.weights.source import CPU, WeightSource


class BlockwiseSource(WeightSource):
    """A weight in a model that is larger than memory. While a forward pass is in the weight's block, the values are read only
    once.

    inner: reads the values from the files. memory: keeps the values until the pass enters the next block.
    """

    def __init__(self, inner: WeightSource, memory: MemoryBudget) -> None:
        self.inner, self.memory = inner, memory
        self.shape, self.dtype, self.holds = inner.shape, inner.dtype, inner.holds
        self.format, self.own, self.in_files, self.nbytes = inner.format, inner.own, inner.in_files, inner.nbytes
        # Parts of a smaller weight are not worth reading alone: `blocks` counts on it being read as a whole.
        self.has_parts = inner.has_parts and 4 * self.numel() > memory.most

    @property
    def input_format(self) -> InputFormat | None:  # type: ignore[override]
        return self.inner.input_format

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.inner.tensors

    def read(self, device: torch.device = CPU) -> torch.Tensor:
        on_device = device.type != "cpu"
        return self.memory.once((self, device), lambda: self.inner.read(device), self.inner, ahead=on_device)

    def elements(self, start: int, count: int) -> torch.Tensor:
        return self.inner.elements(start, count)

    def rows(self, first: int, last: int, device: torch.device = CPU) -> torch.Tensor:
        if 4 * self.numel() <= MOST_KEPT * self.memory.most:
            return super().rows(first, last, device)  # all is kept for the other sequences
        self.memory.note_use(self.inner)
        return self.inner.rows(first, last, device)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        self.memory.note_use(self.inner)
        return self.inner.gather(ids)

    def part(self, index: int, device: torch.device) -> torch.Tensor | None:
        def read() -> torch.Tensor | None:
            if 4 * self.numel() > self.memory.most:  # `blocks` leaves such a weight out of its block's ranges
                self.memory.count((self, index), self.nbytes // self.shape[0])
            return self.inner.part(index, device)

        return self.memory.once((self, device, index), read, self.inner)

    def release(self) -> None:
        self.inner.release()
