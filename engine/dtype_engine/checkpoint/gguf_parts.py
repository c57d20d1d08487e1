"""Reads a model from several GGUF files, as llama.cpp's gguf-split writes it: NAME-00001-of-00003.gguf and so on. The first part
has the fields of the model, and the tensors are in all parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.file_identity import FileIdentity
from dtype_engine.checkpoint.gguf import read_gguf
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.weight_files import gguf_parts, resolve_inside
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def read_gguf_model(
    path: Path,
) -> tuple[tuple[FileIdentity, ...], dict[str, CheckpointTensor], dict[str, Any]]:
    """Return (the state of each file, from before it was read; the tensors of all; the fields of the first, which describe the
    model).

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
