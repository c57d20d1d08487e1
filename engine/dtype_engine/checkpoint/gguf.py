"""Reads the names, shapes and types of the tensors in a GGUF file from its header. The `gguf` package defines the types."""

from __future__ import annotations

import math
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable

_PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "I16": "int16",
          "I32": "int32", "I64": "int64"}  # fmt: skip


def read_gguf(path: Path) -> tuple[dict[str, CheckpointTensor], dict[str, Any]]:
    """Return the tensors of a GGUF file by name, and the fields of its header by name, with the name of `general.file_type`, such
    as "Q4_K_M", instead of its number. Raises UserError, which names the file and the problem.

    Types that only GGUF has (block types such as Q4_K or IQ2_XS) keep their own names, in lower case. If the gguf package can't
    dequantize such a type, only the number of bytes is known.
    """
    header = read_gguf_header(path)
    size = os.path.getsize(path)
    tensors: dict[str, CheckpointTensor] = {}
    for tensor in header.tensors:
        if not tensor.name:
            raise UserError(f"{path}: a tensor of the header has no name: the file is damaged")
        if tensor.name in tensors:
            raise UserError(f"{path}: the header names {printable(tensor.name)!r} twice")
        tensors[tensor.name] = _specification(path, header, tensor, size)
    _check_layout(path, tensors, header.data_start)
    return tensors, header.fields | _file_type(header.fields.get("general.file_type"))


def _file_type(number: object) -> dict[str, str]:
    from gguf.constants import LlamaFileType

    if type(number) is not int:
        return {}
    try:
        return {"general.file_type": LlamaFileType(number).name.removeprefix("MOSTLY_")}
    except ValueError:
        return {}


def _specification(path: Path, header: GGUFHeader, tensor: GGUFTensor, size: int) -> CheckpointTensor:
    """Convert the header of a tensor in a file of `size` bytes. Raises UserError for an unknown type or bytes outside."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(tensor.kind)
        block, nbytes_of_block = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise UserError(
            f"{path}: tensor {printable(tensor.name)} is of type {tensor.kind}, which the gguf package does not know: "
            "the file is damaged, or newer than the package"
        ) from None
    row = tensor.shape[-1] if tensor.shape else 1
    if row % block:
        raise UserError(
            f"{path}: tensor {printable(tensor.name)} has rows of {row} values in blocks of {block}: the file is damaged"
        )
    if 8 * math.prod(extent for extent in tensor.shape if extent) >= 1 << 63 and 0 in tensor.shape:
        # A tensor without elements needs no bytes, but torch would overflow when it computes the strides.
        raise UserError(f"{path}: tensor {printable(tensor.name)} has a shape that is too large")
    nbytes = math.prod(tensor.shape) // block * nbytes_of_block
    start = header.data_start + tensor.start
    if start + nbytes > size:
        raise UserError(
            f"{path}: the bytes of tensor {printable(tensor.name)} lie outside the file's data: it is truncated or damaged"
        )
    own = kind.name
    dtype, packed = _PLAIN.get(own, own.lower()), own not in _PLAIN
    refusal = None
    if header.swapped:
        refusal = "lies in a big-endian file, which is read on such a machine alone"
    elif packed and not _dequantizes(kind, nbytes_of_block):
        refusal = f"is stored as {own.lower()}, which the gguf package can't dequantize"
    return CheckpointTensor(tensor.name, tensor.shape, dtype, path, start, nbytes, packed, refusal)


@cache
def _dequantizes(kind: Any, nbytes: int) -> bool:
    """Return whether the gguf package can dequantize a type, by trying it on a block of zeros, which has `nbytes` bytes."""
    import numpy
    from gguf.quants import dequantize

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dequantize(numpy.zeros((1, nbytes), numpy.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _check_layout(path: Path, tensors: dict[str, CheckpointTensor], data_start: int) -> None:
    """Raise UserError if the bytes of two tensors overlap. Gaps are allowed, for the alignment."""
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start or 0, tensor.nbytes)):
        if tensor.nbytes and (tensor.start or 0) < end:
            raise UserError(f"{path}: tensor {printable(tensor.name)} overlaps another: the file is damaged")
        end = max(end, (tensor.start or 0) + tensor.nbytes)
