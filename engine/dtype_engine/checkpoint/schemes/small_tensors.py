"""Reads small tensors that describe quantized weights, without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import mapping
from dtype_engine.core.errors import UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.regular_files import reading

_LARGEST_PART = 1 << 20


def read_small(tensor: CheckpointTensor) -> bytes:
    """Return the bytes of a small tensor, such as a shape. Raises UserError if it is larger than 1 MiB, or can't be read."""
    if tensor.absent:
        raise UserError(f"{tensor.file}: {tensor.name} is too large to be read from a hub; {hint('download')}")
    if tensor.nbytes > _LARGEST_PART or tensor.start is None:
        raise UserError(f"{tensor.file}: {tensor.name} has {tensor.nbytes} bytes, too many for what it describes")
    with reading(tensor.file):
        # A Python file object would take twice as long, and there are many weights.
        file = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.pread(file, tensor.nbytes, tensor.start)
        finally:
            os.close(file)
    if len(found) < tensor.nbytes:
        raise UserError(f"{tensor.file} was cut short while it was read")
    return found


def json_object(text: str | bytes) -> Mapping[str, Any]:
    """Return the JSON object in a text, or {} if there is none."""
    try:
        return mapping(json.loads(text))
    except (ValueError, RecursionError):
        return {}
