"""What a checkpoint's files call the tensors of a tree."""

from __future__ import annotations

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.tree import TensorInfo


def names_in_files(checkpoint: Checkpoint, tensor: TensorInfo) -> tuple[str, ...]:
    """The names in the files: several where the tensor is packed of several, none where the files lack it."""
    return tensor.stored_as or tuple(name for name in tensor.names if name in checkpoint.weights)[:1]
