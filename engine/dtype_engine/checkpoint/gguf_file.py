"""GGUF: names, shapes and types from the header, read by the `gguf` package."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import UserError
from ..text import printable
from .safetensors_header import CheckpointTensor

_PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "I16": "int16",
          "I32": "int32", "I64": "int64"}  # fmt: skip
_MAGIC = b"GGUF"
_SMALLEST_TENSOR_ENTRY, _SMALLEST_FIELD = 24, 13


def read_gguf(path: Path) -> tuple[dict[str, CheckpointTensor], dict[str, str]]:
    """The tensors of a GGUF file by name, and the text fields of its header. Raises UserError with the file and the reason.

    Types that only GGUF has (blocks of Q4_K, IQ2_XS, ...) keep their own name, in lower case: they are shown, never cast.
    """
    _check_counts(path)
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        tensors: dict[str, CheckpointTensor] = {}
        size = os.path.getsize(path)
        for tensor in reader.tensors:
            name = str(tensor.name)
            own = tensor.tensor_type.name
            start, nbytes = int(tensor.data_offset), int(tensor.n_bytes)
            if not name or name in tensors:
                raise UserError(f"{path}: the header names {printable(name)!r} twice")
            if start + nbytes > size:
                raise UserError(f"{path}: the bytes of tensor {printable(name)} lie outside the file: it is truncated")
            shape = tuple(int(extent) for extent in reversed(tensor.shape.tolist()))
            dtype = _PLAIN.get(own, own.lower())
            tensors[name] = CheckpointTensor(name, shape, dtype, path, start, nbytes, packed=own not in _PLAIN)
        metadata = {
            name: str(field.contents())[:1000] for name, field in reader.fields.items() if name.startswith("general.")
        }
    except UserError:
        raise
    except Exception as error:  # the reader believes what a file says: anything may be wrong with a damaged one
        reason = printable(" ".join(str(error).split()), 200) or type(error).__name__
        raise UserError(f"{path}: this is no valid GGUF file: {reason}") from None
    return tensors, metadata


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
