"""Reads the names, shapes and types of a model's tensors from the headers of its GGUF files. The `gguf` package defines the
types.
"""

from __future__ import annotations

import math
import os
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.file_identity import FileIdentity
from dtype_engine.checkpoint.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor, check_layout
from dtype_engine.checkpoint.schemes.gguf import DECODED_HERE
from dtype_engine.checkpoint.weight_files import gguf_parts, resolve_inside
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable

_PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "I16": "int16",
          "I32": "int32", "I64": "int64"}  # fmt: skip
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
"""The fields of a file that llama.cpp's gguf-split wrote: NAME-00001-of-00003.gguf and so on."""


def read_gguf_model(path: Path) -> tuple[tuple[FileIdentity, ...], dict[str, CheckpointTensor], dict[str, Any]]:
    """Return (the state of each file before it was read; the tensors of all files by name; the fields of the first file, which hold
    for all).

    path: the file of the model, or one of its parts. Raises UserError, also if a part is missing or belongs to another model.
    """
    identity = FileIdentity.of(path)
    tensors, fields = read_gguf(path)
    count = fields.get(_COUNT, 1)
    if type(count) is not int or count <= 1:
        return (identity,), tensors, fields
    names = gguf_parts(path.name)
    if len(names) != count:
        raise UserError(
            f"{path} is one of {count} parts of a model, and its name does not end as in -00001-of-{count:05}.gguf, by which the "
            "other parts are found: give all parts their names again"
        )
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(
            f"{path} is one of {count} parts of a model, and {printable(missing[0])}{more} is not beside it; copy or download it "
            "again"
        )
    files = tuple(path.parent / name if name == path.name else resolve_inside(path.parent, name) for name in names)
    identities = tuple(identity if file == path else FileIdentity.of(file) for file in files)
    parts = [(tensors, fields) if file == path else read_gguf(file) for file in files]
    return identities, _joined(files, parts), parts[0][1]


def _joined(
    files: tuple[Path, ...], parts: list[tuple[dict[str, CheckpointTensor], dict[str, Any]]]
) -> dict[str, CheckpointTensor]:
    """Return the tensors of all parts. Raises UserError if they are not the parts of one model."""
    joined: dict[str, CheckpointTensor] = {}
    for number, (file, (tensors, fields)) in enumerate(zip(files, parts, strict=True)):
        if (fields.get(_NUMBER), fields.get(_COUNT)) != (number, len(parts)):
            said = f"part {fields.get(_NUMBER, 0)} (counted from 0) of {fields.get(_COUNT, 1)}"
            raise UserError(
                f"{file}: its header says that it is {printable(said)}, and by its name it is part {number} of {len(parts)}"
            )
        for name in tensors.keys() & joined.keys():
            raise UserError(
                f"{file}: tensor {printable(name)} is in {joined[name].file.name}, too: these are not one model"
            )
        joined |= tensors
    wanted = parts[0][1].get(_TENSORS, len(joined))
    if wanted != len(joined):
        raise UserError(
            f"{files[0]}: the {len(parts)} parts have {len(joined)} tensors, and the first one says "
            f"{printable(str(wanted), 40)}: these are not one model"
        )
    return joined


def read_gguf(path: Path) -> tuple[dict[str, CheckpointTensor], dict[str, Any]]:
    """Return the tensors of a GGUF file by name, and the fields of its header by name. The number in `general.file_type` is
    replaced by its name, such as "Q4_K_M". Raises UserError, which names the file and the problem.

    Types that only GGUF has (block types such as Q4_K or IQ2_XS) keep their own names, in lower case. Tensors that the gguf package
    can't dequantize have a `refusal`.
    """
    from gguf.constants import LlamaFileType

    header = read_gguf_header(path)
    size = os.path.getsize(path)
    tensors: dict[str, CheckpointTensor] = {}
    for tensor in header.tensors:
        if not tensor.name:
            raise UserError(f"{path}: a tensor of the header has no name: the file is damaged")
        if tensor.name in tensors:
            raise UserError(f"{path}: the header names {printable(tensor.name)!r} twice")
        tensors[tensor.name] = _specification(path, header, tensor, size)
    check_layout(path, tensors, header.data_start, None)  # there are gaps, for the alignment
    if type(number := header.fields.get("general.file_type")) is int:
        with suppress(ValueError):  # of a newer llama.cpp
            header.fields["general.file_type"] = LlamaFileType(number).name.removeprefix("MOSTLY_")
    return tensors, header.fields


def _specification(path: Path, header: GGUFHeader, tensor: GGUFTensor, size: int) -> CheckpointTensor:
    """Return the CheckpointTensor of a tensor's header. size: of the file. Raises UserError for an unknown type or bytes outside
    the file.
    """
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
    elif packed and own not in DECODED_HERE and not _dequantizes(kind, nbytes_of_block):
        refusal = f"is stored as {own.lower()}, which the gguf package can't dequantize"
    return CheckpointTensor(tensor.name, tensor.shape, dtype, path, start, nbytes, packed, refusal)


@cache
def _dequantizes(kind: Any, nbytes: int) -> bool:
    """Return whether the gguf package can dequantize a type, by trying it on a block of zeros. nbytes: the bytes of a block."""
    import numpy
    from gguf.quants import dequantize

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dequantize(numpy.zeros((1, nbytes), numpy.uint8), kind)
    except NotImplementedError:
        return False
    return True
