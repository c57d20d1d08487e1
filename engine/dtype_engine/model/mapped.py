"""One tensor of a checkpoint, mapped: nothing is read until it is used, and nothing of the file stays resident once the
tensor is gone.
"""

from __future__ import annotations

import math
import mmap

import torch

from ..checkpoint import Checkpoint, CheckpointTensor
from ..errors import UserError
from ..storage import bring_back, torch_dtype
from ..text import printable


def read_mapped(stored: CheckpointTensor) -> torch.Tensor:
    """The tensor, in its own dtype and shape, over a private mapping of its bytes (the file can't be written through it).

    Raises UserError when the file can't be read.
    """
    dtype = torch_dtype(stored.dtype)
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=dtype)
    before = stored.start % mmap.ALLOCATIONGRANULARITY
    try:
        with open(stored.file, "rb") as file:
            mapping = mmap.mmap(
                file.fileno(), before + stored.nbytes, access=mmap.ACCESS_COPY, offset=stored.start - before
            )
    except (OSError, ValueError) as error:
        raise UserError(f"can't read {stored.file}: {getattr(error, 'strerror', None) or error}") from None
    if before % dtype.itemsize:  # a file may be laid out so, and torch's kernels rely on aligned addresses
        values = torch.frombuffer(mapping, dtype=torch.uint8, count=stored.nbytes, offset=before).clone().view(dtype)
    else:
        values = torch.frombuffer(mapping, dtype=dtype, count=math.prod(stored.shape), offset=before)
    return values.view(stored.shape)


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor by the name that the model has for it, as it is stored; one stored with scales as float32 values.

    Raises UserError when its file can't be read, or keeps it in a form of its own.
    """
    if checkpoint.values is not None:
        found = checkpoint.values[name]
        assert isinstance(found, torch.Tensor)
        return found
    stored = checkpoint.weights[name]
    if stored.packed:
        raise UserError(f"{printable(name)} is packed as {stored.dtype}, which only llama.cpp reads")
    scaled = checkpoint.scaled.get(name)
    if scaled is not None:
        return bring_back(read_mapped(scaled.data), read_mapped(scaled.scale).reshape(-1), torch.float32)
    return read_mapped(stored)


def read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every tensor by name, as `read_tensor` gives it."""
    return {name: read_tensor(checkpoint, name) for name in checkpoint.weights}
