"""Checkpoints: from files to the specification of every tensor, by headers alone. Never imports torch."""

from .folder import Checkpoint, Scaled, inside, open_checkpoint, read_json
from .safetensors_header import CheckpointTensor, read_header

__all__ = ["Checkpoint", "CheckpointTensor", "Scaled", "inside", "open_checkpoint", "read_header", "read_json"]
