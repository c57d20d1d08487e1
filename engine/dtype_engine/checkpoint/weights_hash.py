"""Identifies the weights of a checkpoint by a hash that other programs compute as well."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.file_identity import unchanged
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import open_regular, reading

_PIECE_BYTES = 8 << 20


def weights_sha256(checkpoint: Checkpoint, on_bytes: Callable[[int, int], None] = ignore) -> str:
    """Return a SHA-256 of the files with the weights, as 64 hexadecimal digits. Of one file, it is the hash of its content, which
    hubs show. Of several files, it is that of the lines that `sha256sum` prints for them, `HASH  NAME`, in the order of their names
    relative to the folder: `sha256sum *.safetensors | sha256sum`. The whole files are read.

    on_bytes: called with the numbers of read and of all bytes. Raises UserError if a file can't be read or changes,
    and for an adapter that is merged into its base.
    """
    if checkpoint.merged is not None:
        raise UserError(
            "an adapter with its base is no checkpoint of its own, so no hash names it: export it, and use the export"
        )
    folder = checkpoint.folder
    files = {_name(file, folder): file for file in checkpoint.files}
    with unchanged(checkpoint.identities):
        whole, before = sum(file.stat().st_size for file in files.values()), 0
        hashes = {}
        for name in sorted(files, key=str.encode):
            hashes[name] = file_sha256(files[name], partial(_after, before, whole, on_bytes))
            before += files[name].stat().st_size
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    return hashlib.sha256("".join(f"{each}  {name}\n" for name, each in hashes.items()).encode()).hexdigest()


def _after(before: int, whole: int, on_bytes: Callable[[int, int], None], done: int) -> None:
    on_bytes(before + done, whole)


def file_sha256(path: Path, on_bytes: Callable[[int], None] = ignore) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits. on_bytes: called with the number of read bytes. Raises UserError."""
    digest, done = hashlib.sha256(), 0
    with reading(path), open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            on_bytes(done := done + len(piece))
    return digest.hexdigest()


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.name
