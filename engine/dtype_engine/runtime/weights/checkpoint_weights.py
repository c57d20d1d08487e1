"""The sources of the weights of a checkpoint, whether or not a module is loaded from it."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from dtype_engine.checkpoint import Checkpoint, CheckpointTensor
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.runtime.device import copied_to
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.weights.coded import CodedSource
from dtype_engine.runtime.weights.files import read_mapped, read_range, torch_shape
from dtype_engine.runtime.weights.source import CPU, WeightSource

How = Literal["mapped", "copied"]
"""How plain values in a file are read. "mapped" maps the file for each use, so that an operation reads the pages that it needs.
"copied" copies the values to memory, for a file that may change meanwhile.
"""


def source_of(checkpoint: Checkpoint, name: str, how: How = "mapped") -> WeightSource:
    """Return the source of a weight of a checkpoint. Its values have the stored dtype, or float32 for a weight that is stored as
    codes. Nothing is read until the values are needed. name: a key in `checkpoint.weights`. how: how to read plain values (see
    `How`).
    """
    if name in checkpoint.coded:
        return CodedSource(checkpoint.coded[name])
    return FileSource(checkpoint, checkpoint.weights[name], how)


class FileSource(WeightSource):
    """A weight of plain values, which are read from their file at each use. Values that can't be mapped come from the loader of the
    pickle. If the loader has none, reading raises UserError.
    """

    def __init__(self, checkpoint: Checkpoint, stored: CheckpointTensor, how: How = "mapped") -> None:
        self._checkpoint, self._stored = checkpoint, stored
        in_file = checkpoint.values is None and stored.bytes is not None
        self._bytes = stored.bytes if in_file and how == "copied" else None
        self.plain = not in_file
        self.in_files = (stored,) if in_file else ()
        self.shape = torch_shape(stored) if in_file else stored.shape
        self.has_parts = in_file and len(stored.shape) > 2
        self.nbytes = stored.nbytes

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.read().dtype if self.plain else torch_dtype(self._stored.dtype)

    @property
    def holds(self) -> torch.dtype:  # type: ignore[override]
        return self.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.read(),)

    def held(self, device: torch.device) -> torch.Tensor:
        return self.read(device) if self.plain else super().held(device)

    def read(self, device: torch.device = CPU) -> torch.Tensor:
        if self._bytes is not None:
            return self.elements(0, self.numel()).view(self.shape).to(device)
        return copied_to(read_stored(self._checkpoint, self._stored), device)

    def elements(self, start: int, count: int) -> torch.Tensor:
        if self._bytes is None:
            return super().elements(start, count)
        return read_range(self._bytes, self.dtype, start, count)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids.cpu(), self.read()).to(ids.device)

    def part(self, index: int, device: torch.device) -> torch.Tensor | None:
        return self.read()[index].to(device) if self.has_parts and 0 <= index < self.shape[0] else None


def read_stored(checkpoint: Checkpoint, stored: CheckpointTensor, alone: bool = False) -> torch.Tensor:
    """Return a tensor of a checkpoint exactly as its file stores it, for example codes without their scales.

    alone: as in `read_mapped`. Raises UserError if the file can't be read or the tensor has no plain values.
    """
    if stored.refusal is not None:
        raise UserError(f"{printable(stored.name)} {stored.refusal}, so its values can't be read")
    checkpoint.need_values()
    if checkpoint.values is not None:
        tensor = checkpoint.values[stored.name]
        assert isinstance(tensor, torch.Tensor)
        return tensor
    return read_mapped(stored, alone)
