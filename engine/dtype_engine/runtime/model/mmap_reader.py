"""Reads a tensor of a checkpoint by memory-mapping its file. Pages are read on first use, and none stays resident after the tensor
is freed.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import msgspec
import torch

from dtype_engine.checkpoint import Checkpoint, CheckpointTensor, QuantizedWeight
from dtype_engine.checkpoint.schemes import EncodedWeight
from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import SCALE
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.runtime.formats import schemes
from dtype_engine.runtime.formats.quantize_blocks import from_file
from dtype_engine.runtime.numerics.quantize import dequantize, torch_dtype


def read_mapped(stored: CheckpointTensor, alone: bool = False) -> torch.Tensor:
    """Memory-map a stored tensor, in its own dtype and shape. Its bytes must be contiguous in the file. Tensors that are stored in
    any other way have to be read with `read_tensor`.

    alone: whether to ask the system not to read what lies around the tensor in the file as well, which may be several MiB. The
    mapping is private, so writes to the tensor do not change the file. Raises UserError if the file can't be read.
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
    try:
        with open(byte_range.file, "rb") as file:
            mapping = mmap.mmap(
                file.fileno(), before + byte_range.nbytes, access=mmap.ACCESS_COPY, offset=byte_range.start - before
            )
    except (OSError, ValueError) as error:
        raise UserError(f"can't read {byte_range.file}: {getattr(error, 'strerror', None) or error}") from None
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


def torch_shape(stored: CheckpointTensor) -> tuple[int, ...]:
    """Return the shape that torch gives a stored tensor. For `float4_e2m1fn_x2`, the last dimension is half as long as in the file,
    because torch counts a byte with two values as one element.
    """
    if stored.dtype == "float4_e2m1fn_x2" and stored.shape:
        return (*stored.shape[:-1], stored.shape[-1] // 2)
    return stored.shape


def read_stored(checkpoint: Checkpoint, stored: CheckpointTensor, alone: bool = False) -> torch.Tensor:
    """Return a tensor of a checkpoint exactly as its file stores it, for example codes without their scales.

    alone: whether to read nothing around it, as in `read_mapped`. Raises UserError if the file can't be read or the tensor has no
    plain values (sparse, without data, ...).
    """
    if stored.refusal is not None:
        raise UserError(f"{printable(stored.name)} {stored.refusal}, so its values can't be read")
    checkpoint.need_values()
    if checkpoint.values is not None:
        tensor = checkpoint.values[stored.name]
        assert isinstance(tensor, torch.Tensor)
        return tensor
    return read_mapped(stored, alone)


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return the values of a weight from a checkpoint in any file format: in the stored dtype, or in float32 for a weight that is
    stored with scales or in another program's format.

    name: the weight's name without suffixes for codes and scales. Raises UserError if the file can't be read or the tensor has no
    plain values.
    """
    weight = checkpoint.quantized.get(name)
    if weight is not None:
        return dequantize(*read_quantized(weight), torch.float32, dtypes.BY_NAME[weight.dtype].blocks)
    if name in checkpoint.encoded:
        return read_encoded(checkpoint.encoded[name])
    return read_stored(checkpoint, checkpoint.weights[name])


def read_quantized(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a weight that an export stored with scales. The scales are float32: one for each channel
    [channels], one for the tensor [1], or one for each block [blocks down, blocks across].
    """
    if weight.dtype in dtypes.BLOCK_FORMATS:
        return from_file(
            {suffix: read_mapped(part) for suffix, part in weight.parts.items()}, weight.shape, weight.dtype
        )
    return read_mapped(weight.data), read_mapped(weight.parts[SCALE]).reshape(-1).clone()


def read_encoded(weight: EncodedWeight, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Return the values of a weight that another program quantized, decoded to float32. Raises UserError if a file can't be read.

    first, last: decode only the indexes from `first` up to `last` along the weight's first dimension; by default, all.
    """
    return schemes.decode(weight, {role: read_part(part) for role, part in weight.parts.items()}, first, last)


def read_part(part: CheckpointTensor) -> torch.Tensor:
    """Return one of the tensors that a file stores for a quantized weight, such as its codes, mapped from the file. A tensor in
    GGUF blocks, for which torch has no dtype, is returned as its bytes: uint8 [bytes].
    """
    if not part.packed:
        return read_mapped(part)
    return read_mapped(msgspec.structs.replace(part, dtype="uint8", shape=(part.nbytes,), packed=False))
