"""Reads the header of a safetensors file: 8 bytes with the length in little-endian order, then JSON of this length.

A header is untrusted. It is checked against the rules of the format: entries neither overlap nor leave gaps, each has exactly the
bytes that its shape and dtype need, and all of them are inside the file.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import open_regular, reading
from dtype_engine.core.text import printable

LONGEST_HEADER = 100_000_000
"""The limit of the safetensors library, in bytes."""
MOST_TENSORS = 500_000
"""The maximum number of tensors in a checkpoint. Headers and tree of so many take about 10 s and 700 MB. The largest model of 2026
has 90,427 (DeepSeek-V3, 671 B), or three times as many if each weight is packed in parts.
"""
_MOST_DIMENSIONS = 64
_BRACES = 100_000


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes in a file, from the offset `start` on."""

    file: Path
    start: int
    nbytes: int


class CheckpointTensor(msgspec.Struct, frozen=True, gc=False):
    """The header of one tensor. Large checkpoints have 90,000, and a struct is made 15 times as fast as a dataclass."""

    name: str
    shape: tuple[int, ...]
    """The shape as in a safetensors header. For `float4_e2m1fn_x2`, it counts values, two of which share a byte."""
    dtype: str
    """torch's name, such as `bfloat16`. If `packed`: a GGUF block type such as `q4_k`, or a format such as `gptq:int4@g128`."""
    file: Path
    start: int | None
    """Offset of the tensor's first byte in the file, or None if its bytes are not contiguous (pickles)."""
    nbytes: int
    packed: bool = False
    """Whether the tensor has a GGUF block type, or this describes a whole weight, with codes and scales."""
    refusal: str | None = None
    """Why the tensor's values can't be read or written, such as "is sparse"."""
    absent: bool = False
    """Whether this machine has only the tensor's header, and its values are on a hub."""

    @property
    def bytes(self) -> ByteRange | None:
        """The range of the file that holds the tensor's values as torch stores them. None if there is no such range, or if the
        values can't be read.
        """
        if self.start is None or self.packed or self.refusal is not None or self.absent:
            return None
        return ByteRange(self.file, self.start, self.nbytes)

    def at(self, index: int) -> CheckpointTensor:
        """Return the part of the tensor at one index of the first dimension, such as an expert."""
        nbytes = self.nbytes // self.shape[0]
        start = None if self.start is None else self.start + index * nbytes
        return msgspec.structs.replace(self, shape=self.shape[1:], start=start, nbytes=nbytes)


def read_header(path: Path) -> tuple[dict[str, CheckpointTensor], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata. Raises UserError, which names the file and problem."""
    raw, body_start, size = _header_bytes(path)
    if raw.count(b"{") > MOST_TENSORS + _BRACES:  # one begins every entry, and some may stand in the metadata
        raise UserError(too_many_tensors(path))
    try:
        header = json.loads(raw, object_pairs_hook=partial(_no_duplicates, path))
    except (ValueError, RecursionError):
        raise UserError(
            f"{path}: the header is not valid JSON, so this is no safetensors file or it is damaged"
        ) from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: the header is not a JSON object, so this is no safetensors file")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{path}: the header's __metadata__ is not a map of strings")
    if len(header) > MOST_TENSORS:
        raise UserError(too_many_tensors(path))
    known: _Known = {}
    tensors = {name: _entry(path, name, entry, body_start, size, known) for name, entry in header.items()}
    check_layout(path, tensors, body_start, size)
    return tensors, metadata


def too_many_tensors(path: Path) -> str:
    """Return the message of the error for a checkpoint with too many tensors."""
    return f"{path}: over {MOST_TENSORS:,} tensors are more than any model has, and are not read"


def _header_bytes(path: Path) -> tuple[bytes, int, int]:
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise UserError(f"{path}: {size} bytes are too few for a safetensors file")
        length = int.from_bytes(prefix, "little")
        if prefix == b"version " and size < 1_000:
            raise UserError(
                f"{path} is a pointer of Git LFS, and the weights are not here: fetch them by `git lfs pull`"
            )
        if length > LONGEST_HEADER:
            raise UserError(
                f"{path}: the header claims {length} bytes, over the limit of {LONGEST_HEADER}; "
                "this is no safetensors file"
            )
        if 8 + length > size:
            raise UserError(
                f"{path}: the header claims {length} bytes and the file has {size}: "
                "it is truncated or no safetensors file"
            )
        return file.read(length), 8 + length, size


def _no_duplicates(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise UserError(f"{path}: the header names {printable(twice)!r} twice")
    return made


_Known = dict[tuple[str, tuple[int, ...], int], tuple[str, tuple[int, ...]]]
"""Maps (dtype in the header, shape, number of bytes) to (torch's name for the dtype, shape), for combinations that were checked.
Thousands of tensors have a few combinations; each is checked once, and its tensors share one shape, a tuple of 120 bytes.
"""
_INT = {int}


def _entry(path: Path, name: str, entry: Any, body_start: int, size: int, known: _Known) -> CheckpointTensor:
    """Check a header's entry and return its tensor. body_start: the offset at which the tensors' bytes begin. size: the file's."""
    if not name:
        raise UserError(f"{path}: the header has a tensor without a name")
    try:
        code, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: tensor {printable(name)} needs dtype, shape and data_offsets") from None
    if not isinstance(code, str) or code not in dtypes.BY_SAFETENSORS:
        raise UserError(f"{path}: tensor {printable(name)} has the unknown dtype {printable(str(code))!r}")
    if not isinstance(shape, list) or not set(map(type, shape)) <= _INT:
        raise UserError(f"{path}: tensor {printable(name)} has no valid shape")
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= size - body_start:
        raise UserError(
            f"{path}: the bytes of tensor {printable(name)} lie outside the file: it is truncated or damaged"
        )
    wanted = code, tuple(shape), end - start
    if wanted not in known:
        known[wanted] = _check_shape(path, name, *wanted)
    dtype, held = known[wanted]
    return CheckpointTensor(name, held, dtype, path, body_start + start, end - start)


def _check_shape(path: Path, name: str, code: str, shape: tuple[int, ...], nbytes: int) -> tuple[str, tuple[int, ...]]:
    """Return torch's name for the dtype `code`, and the shape. Raises UserError unless such a tensor has `nbytes` bytes."""
    dtype = dtypes.BY_SAFETENSORS[code]
    if len(shape) > _MOST_DIMENSIONS or not all(map(_in_range, shape)):
        raise UserError(f"{path}: tensor {printable(name)} has no valid shape")
    needed = (math.prod(shape) * dtype.bits + 7) // 8
    if needed != nbytes:
        raise UserError(f"{path}: tensor {printable(name)} needs {needed} bytes for its shape and has {nbytes}")
    if not _in_range(8 * math.prod(extent for extent in shape if extent)):
        # A tensor without elements needs no bytes, but torch multiplies its other extents for the strides.
        raise UserError(f"{path}: tensor {printable(name)} has a shape that is too large")
    return dtype.name, shape


def _in_range(number: int) -> bool:
    return 0 <= number < 1 << 63


def check_layout(path: Path, tensors: dict[str, CheckpointTensor], body_start: int, size: int | None) -> None:
    """Raise UserError if the bytes of two tensors overlap or, unless `size` is None, if some bytes belong to no tensor. body_start:
    the offset at which the tensors' bytes begin. size: the file's.
    """
    at = body_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start or 0, tensor.nbytes)):
        start = tensor.start or 0
        if start < at and (tensor.nbytes or size is not None):
            raise UserError(f"{path}: tensor {printable(tensor.name)} overlaps another: the file is damaged")
        if start > at and size is not None:
            raise UserError(f"{path}: tensor {printable(tensor.name)} leaves a hole before it: the file is damaged")
        at = max(at, start + tensor.nbytes)
    if size is not None and at != size:
        raise UserError(f"{path}: {size - at} bytes after the last tensor belong to nothing: the file is damaged")
