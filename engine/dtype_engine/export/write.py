"""Writing safetensors files a tensor at a time, in pieces: memory never holds more than one piece, or one scaled tensor.

The format is a length, a JSON header, and the tensors' bytes. Sizes are known beforehand, so the header can be written
first; the safetensors library would need all the tensors of a file at once.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import dtypes
from ..checkpoint import CheckpointTensor
from ..errors import Cancelled, UserError
from ..storage import torch_dtype
from .contents import Item, Piece, as_bytes

_PIECE = 1 << 20
"""Bytes that are cast or copied at once: small enough that the allocator gives the same warm memory out again."""


class Progress:
    """Counts bytes written, tells them, and asks before each piece whether to stop. Raises Cancelled."""

    def __init__(self, total: int, told: Callable[[int, int], None], cancelled: Callable[[], bool]) -> None:
        self.done = 0
        self.total = total
        self._told = told
        self._cancelled = cancelled

    def wrote(self, size: int) -> None:
        self.done += size
        self._told(self.done, self.total)
        if self._cancelled():
            raise Cancelled


def header(pieces: Sequence[Piece], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """A file's length and header, and where in the file each tensor begins.

    Laid out as the safetensors library does it: the widest dtypes first, then by name, so that every tensor is aligned.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    at = 0
    for piece in sorted(pieces, key=lambda piece: (-dtypes.BY_NAME[piece.dtype].bits, piece.name)):
        entries[piece.name] = {
            "dtype": dtypes.BY_NAME[piece.dtype].safetensors,
            "shape": list(piece.shape),
            "data_offsets": [at, at + piece.nbytes],
        }
        starts[piece.name] = at
        at += piece.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    body = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: body + start for name, start in starts.items()}


def write_file(path: Path, items: Sequence[Item], metadata: Mapping[str, str], progress: Progress) -> None:
    """One safetensors file with these items. Raises Cancelled, OSError."""
    head, starts = header([piece for item in items for piece in item.pieces], metadata)
    with open(path, "wb", buffering=0) as file:
        out = file.fileno()
        _write(out, head, 0)
        for item in items:
            for place, piece in enumerate(item.pieces):
                if item.raw:
                    _copy(item.raw[place], out, starts[piece.name], progress)
            if item.raw:
                continue
            if item.scaled:
                for tensor, piece in zip(item.read(), item.pieces, strict=True):
                    _write_tensor(tensor, torch_dtype(piece.dtype), out, starts[piece.name], progress)
            else:
                _write_tensor(item.values(), torch_dtype(item.dtype), out, starts[item.name], progress)


def _write_tensor(tensor: torch.Tensor, dtype: torch.dtype, out: int, at: int, progress: Progress) -> None:
    """The values in `dtype`, cast piece by piece: a cast is of each element alone, so this gives what the whole would."""
    flat = tensor.reshape(-1)
    step = _PIECE // max(flat.element_size(), dtype.itemsize)
    for start in range(0, flat.numel(), step):
        data = as_bytes(flat[start : start + step].to(dtype))
        _write(out, data.numpy().data, at)
        at += len(data)
        progress.wrote(len(data))


def _copy(source: CheckpointTensor, out: int, at: int, progress: Progress) -> None:
    """A tensor's bytes as they are, from file to file: inside the kernel where the two file systems can."""
    try:
        file = open(source.file, "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise UserError(f"can't read {source.file}: {error.strerror}") from None
    with file:
        start, left = source.start, source.nbytes
        while left:
            copied = _copy_piece(file.fileno(), start, out, at, min(left, _PIECE))
            if not copied:
                raise UserError(f"{source.file} was cut short while it was read")
            start, at, left = start + copied, at + copied, left - copied
            progress.wrote(copied)


def _copy_piece(source: int, start: int, out: int, at: int, size: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            if copied := os.copy_file_range(source, out, size, start, at):
                return copied
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
                raise
    data = os.pread(source, size, start)
    _write(out, data, at)
    return len(data)


def _write(out: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(out, view, at)
        view, at = view[written:], at + written
