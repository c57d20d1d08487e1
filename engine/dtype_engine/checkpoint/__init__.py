"""Checkpoints: from files to the specification of every tensor, by headers alone."""

from dtype_engine.checkpoint.cut_files import refuse_unreadable, unchanged
from dtype_engine.checkpoint.file_identity import FileIdentity, Watch, refuse_changed
from dtype_engine.checkpoint.folder import (
    PICKLES,
    Checkpoint,
    Scaled,
    inside,
    needs_torch,
    open_checkpoint,
    peek_first_shard,
    read_json,
)
from dtype_engine.checkpoint.safetensors_header import ByteRange, CheckpointTensor, read_header

__all__ = [
    "PICKLES",
    "ByteRange",
    "Checkpoint",
    "CheckpointTensor",
    "FileIdentity",
    "Scaled",
    "Watch",
    "inside",
    "needs_torch",
    "open_checkpoint",
    "peek_first_shard",
    "read_header",
    "read_json",
    "refuse_changed",
    "refuse_unreadable",
    "unchanged",
]
