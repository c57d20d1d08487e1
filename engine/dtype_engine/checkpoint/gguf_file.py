"""GGUF: names, shapes and types from the header, read by the `gguf` package."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..text import printable
from .safetensors_header import CheckpointTensor

_PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "I16": "int16",
          "I32": "int32", "I64": "int64"}  # fmt: skip
_MAGIC = b"GGUF"
_SMALLEST_TENSOR_ENTRY, _SMALLEST_FIELD = 24, 13


def read_gguf(path: Path) -> tuple[dict[str, CheckpointTensor], dict[str, str]]:
    """The tensors of a GGUF file by name, and the text fields of its header. Raises UserError with the file and the reason.

    Types that only GGUF has (blocks of Q4_K, IQ2_XS, ...) keep their own name, in lower case. Those that the gguf package can
    dequantize have float32 values, which may be cast; of the others only the bytes are known.
    """
    _check_counts(path)
    from gguf import GGUFReader

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's, of offsets that run over
            reader = GGUFReader(path)
        tensors: dict[str, CheckpointTensor] = {}
        dequantized: dict[str, bool] = {}
        size = os.path.getsize(path)
        swapped = reader.byte_order == "S"
        for tensor in reader.tensors:
            name = str(tensor.name)
            own = tensor.tensor_type.name
            start, nbytes = int(tensor.data_offset), int(tensor.n_bytes)
            if not name or name in tensors:
                raise UserError(f"{path}: the header names {printable(name)!r} twice")
            if start < reader.data_offset or start + nbytes > size:
                raise UserError(
                    f"{path}: the bytes of tensor {printable(name)} lie outside the file's data: it is truncated or damaged"
                )
            shape = tuple(int(extent) for extent in reversed(tensor.shape.tolist()))
            dtype, packed = _PLAIN.get(own, own.lower()), own not in _PLAIN
            refusal = None
            if swapped:
                refusal = "lies in a big-endian file, which is read on such a machine alone"
            elif packed and not _dequantizes(own, tensor, dequantized):
                refusal = f"is stored as {own.lower()}, which the gguf package can't dequantize"
            tensors[name] = CheckpointTensor(name, shape, dtype, path, start, nbytes, packed, refusal)
        _check_layout(path, tensors, int(reader.data_offset))
        metadata = {
            name: str(field.contents())[:1000] for name, field in reader.fields.items() if name.startswith("general.")
        }
    except UserError:
        raise
    except Exception as error:  # the reader believes what a file says: anything may be wrong with a damaged one
        reason = printable(" ".join(str(error).split()), 200) or type(error).__name__
        raise UserError(f"{path}: this is no valid GGUF file: {reason}") from None
    return tensors, metadata


def _dequantizes(own: str, tensor: Any, known: dict[str, bool]) -> bool:
    """Whether the gguf package has a dequantizer for a tensor's type: found out with a row of it, and kept in `known`."""
    from gguf.quants import dequantize

    if own in known:
        return known[own]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dequantize(tensor.data[:1], tensor.tensor_type)
        known[own] = True
    except NotImplementedError:
        known[own] = False
    return known[own]


def _check_layout(path: Path, tensors: dict[str, CheckpointTensor], data_start: int) -> None:
    """Refuse tensors that share bytes. Holes are allowed: each tensor begins at a multiple of the file's alignment."""
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start or 0, tensor.nbytes)):
        if tensor.nbytes and (tensor.start or 0) < end:
            raise UserError(f"{path}: tensor {printable(tensor.name)} overlaps another: the file is damaged")
        end = max(end, (tensor.start or 0) + tensor.nbytes)


def _check_counts(path: Path) -> None:
    """Refuse counts that the file has no room for, before the reader loops over them."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file")
        with open(path, "rb") as file:
            head = file.read(24)
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    if len(head) < 24 or head[:4] != _MAGIC:
        raise UserError(f"{path} is no GGUF file: it does not begin with GGUF")
    order = "little" if int.from_bytes(head[4:8], "little") < 1 << 16 else "big"
    tensors, fields = (int.from_bytes(head[at : at + 8], order) for at in (8, 16))  # type: ignore[arg-type]
    if tensors * _SMALLEST_TENSOR_ENTRY + fields * _SMALLEST_FIELD > status.st_size:
        raise UserError(
            f"{path}: the header claims {tensors} tensors and {fields} fields and the file has {status.st_size} bytes: "
            "it is truncated or damaged"
        )
