"""The sources of the weights of a checkpoint, whether or not a module is loaded from it."""

from __future__ import annotations

from typing import Literal

import torch

from dtype_engine.checkpoint import Checkpoint, CheckpointTensor
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.runtime.weights.coded import CodedSource
from dtype_engine.runtime.weights.files import read_mapped
from dtype_engine.runtime.weights.plain import FileSource, PlainSource
from dtype_engine.runtime.weights.source import WeightSource


def source_of(checkpoint: Checkpoint, name: str, how: Literal["mapped", "copied"] = "mapped") -> WeightSource:
    """Return the source of a weight of a checkpoint. Its values have the stored dtype, or float32 for a weight that is stored as
    codes.

    name: a key in `checkpoint.weights`. how: how plain values in files are read, as in `FileSource`. Raises UserError if the weight
    has no values that can be read (sparse, without data, ...).
    """
    if name in checkpoint.coded:
        return CodedSource(checkpoint.coded[name])
    stored = checkpoint.weights[name]
    if (
        stored.refusal is None
        and checkpoint.values is None
        and stored.bytes is not None
        and not checkpoint.headers_alone
    ):
        return FileSource(stored, how)
    return PlainSource(read_stored(checkpoint, stored))


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
