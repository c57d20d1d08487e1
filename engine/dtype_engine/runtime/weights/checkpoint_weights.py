"""The sources of the weights of a checkpoint, whether or not a module is loaded from it."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from dtype_engine.checkpoint import Checkpoint, CheckpointTensor
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.runtime.weights.coded import CodedSource
from dtype_engine.runtime.weights.files import read_mapped
from dtype_engine.runtime.weights.plain import FileSource
from dtype_engine.runtime.weights.source import CPU, WeightSource


def source_of(checkpoint: Checkpoint, name: str, how: Literal["mapped", "copied"] = "mapped") -> WeightSource:
    """Return the source of a weight of a checkpoint. Its values have the stored dtype, or float32 for a weight that is stored as
    codes. Nothing is read before the values are asked for.

    name: a key in `checkpoint.weights`. how: how plain values in files are read, as in `FileSource`.
    """
    if name in checkpoint.coded:
        return CodedSource(checkpoint.coded[name])
    stored = checkpoint.weights[name]
    if checkpoint.values is None and stored.bytes is not None:
        return FileSource(stored, how)
    return _ReadSource(checkpoint, stored)


class _ReadSource(WeightSource):
    """A weight that can't be mapped: the loader of its pickle has the values, or there are none, and reading raises UserError."""

    plain = True

    def __init__(self, checkpoint: Checkpoint, stored: CheckpointTensor) -> None:
        self._checkpoint, self._stored = checkpoint, stored
        self.shape = stored.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.read().dtype

    @property
    def holds(self) -> torch.dtype:  # type: ignore[override]
        return self.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.read(),)

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes

    def held(self, device: torch.device) -> torch.Tensor:
        return self.read(device)

    def read(self, device: torch.device = CPU) -> torch.Tensor:
        return read_stored(self._checkpoint, self._stored).to(device)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids.cpu(), self.read()).to(ids.device)


def read_stored(checkpoint: Checkpoint, stored: CheckpointTensor, alone: bool = False) -> torch.Tensor:
    """Return a tensor of a checkpoint exactly as its file stores it, for example codes without their scales.

    alone: whether to read nothing around it, as in `read_mapped`. Raises UserError if the file can't be read or the tensor has no
    plain values.
    """
    if stored.refusal is not None:
        raise UserError(f"{printable(stored.name)} {stored.refusal}, so its values can't be read")
    checkpoint.need_values()
    if checkpoint.values is not None:
        tensor = checkpoint.values[stored.name]
        assert isinstance(tensor, torch.Tensor)
        return tensor
    return read_mapped(stored, alone)
