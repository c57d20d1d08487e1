"""Reads a stored tensor from its file: by a memory mapping, which reads pages on first use and keeps none after the tensor is
freed, or by a copy. If another program truncates a mapped file, a signal (SIGBUS) ends this process; a copy only raises an error.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import sys
from contextlib import suppress

import msgspec
import torch

from dtype_engine.checkpoint import ByteRange, CheckpointTensor
from dtype_engine.core.errors import UserError, exhausted
from dtype_engine.core.regular_files import reading
from dtype_engine.core.text import printable
from dtype_engine.runtime.formats.dequantize import torch_dtype


def read_mapped(stored: CheckpointTensor, alone: bool = False) -> torch.Tensor:
    """Memory-map a stored tensor, in its own dtype and shape. Writes to the tensor do not change the file. alone: whether to ask
    the system to read only the tensor's own bytes. By default, it may also read several MiB around them. Raises UserError if the
    file can't be read, or if the tensor's bytes are not contiguous in it.
    """
    byte_range = stored.bytes
    if byte_range is None:
        raise UserError(
            f"{printable(stored.name)} can't be mapped from {stored.file}: its bytes lie nowhere as torch has them"
        )
    dtype = torch_dtype(stored.dtype)
    shape = torch_shape(stored)
    if not byte_range.nbytes:
        return torch.empty(shape, dtype=dtype)
    before = byte_range.start % mmap.ALLOCATIONGRANULARITY
    _allow_many_files()
    try:
        with open(byte_range.file, "rb") as file:
            mapping = mmap.mmap(
                file.fileno(), before + byte_range.nbytes, access=mmap.ACCESS_COPY, offset=byte_range.start - before
            )
    except (OSError, ValueError) as error:
        raise UserError(
            f"can't read {byte_range.file}: {exhausted(error) or getattr(error, 'strerror', None) or error}"
        ) from None
    if alone and hasattr(mmap, "MADV_RANDOM"):
        with suppress(OSError):  # some file systems take no advice
            mapping.madvise(mmap.MADV_RANDOM)
    if before % dtype.itemsize:  # the tensor is not aligned in its file, and torch's kernels need aligned addresses
        values = (
            torch.frombuffer(mapping, dtype=torch.uint8, count=byte_range.nbytes, offset=before).clone().view(dtype)
        )
    else:
        values = torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=before)
    return values.view(shape)


@functools.cache
def _allow_many_files() -> None:
    """Let this process open as many files as the system allows. Python keeps a file descriptor for each mapping, and a model may
    have more weights than the usual limit of 1,024 descriptors.
    """
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def read_part(part: CheckpointTensor) -> torch.Tensor:
    """Memory-map a tensor of a coded weight, such as its codes. A tensor of GGUF blocks is returned as uint8 [bytes]."""
    if not part.packed:
        return read_mapped(part)
    return read_mapped(msgspec.structs.replace(part, dtype="uint8", shape=(part.nbytes,), packed=False))


def torch_shape(stored: CheckpointTensor) -> tuple[int, ...]:
    """Return a stored tensor's shape in torch, which counts a byte with two values of `float4_e2m1fn_x2` as one element."""
    if stored.dtype == "float4_e2m1fn_x2" and stored.shape:
        return (*stored.shape[:-1], stored.shape[-1] // 2)
    return stored.shape


def read_range(byte_range: ByteRange, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
    """Copy `count` elements of a tensor whose bytes are `byte_range`, starting at the flat index `start`: [count]. Raises UserError
    if the file is too short or can't be read.
    """
    buffer = bytearray(count * dtype.itemsize)
    view, at = memoryview(buffer), byte_range.start + start * dtype.itemsize
    with reading(byte_range.file), open(byte_range.file, "rb", buffering=0) as file:
        while view:
            got = os.preadv(file.fileno(), [view], at)
            if not got:
                raise UserError(f"{byte_range.file} was cut short while it was read")
            view, at = view[got:], at + got
    return torch.frombuffer(buffer, dtype=dtype) if count else torch.empty(0, dtype=dtype)
