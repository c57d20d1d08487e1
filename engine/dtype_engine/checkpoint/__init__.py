"""Checkpoints: finds their files, and reads the name, dtype and shape of every tensor from the files' headers alone."""

from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.file_identity import FileIdentity, Watch, refuse_changed, unchanged
from dtype_engine.checkpoint.folder import is_adapter, needs_torch, open_checkpoint, peek_first_shard
from dtype_engine.checkpoint.safetensors_header import ByteRange, CheckpointTensor
from dtype_engine.checkpoint.weight_files import PICKLES, read_json, resolve_inside

__all__ = [
    "PICKLES",
    "ByteRange",
    "Checkpoint",
    "CheckpointTensor",
    "FileIdentity",
    "Watch",
    "is_adapter",
    "needs_torch",
    "open_checkpoint",
    "peek_first_shard",
    "read_json",
    "refuse_changed",
    "resolve_inside",
    "unchanged",
]
