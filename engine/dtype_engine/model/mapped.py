"""One tensor of a safetensors file, mapped: nothing is read until it is used, and nothing of the file stays resident
once the tensor is gone.
"""

from __future__ import annotations

import math
import mmap

import torch

from ..checkpoint import CheckpointTensor
from ..errors import UserError
from ..storage import torch_dtype


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
