"""Determines the kind of a weights file from its name or, if the name does not show it (`net.pth.tar`), from its first bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from dtype_engine.checkpoint.safetensors_header import LONGEST_HEADER
from dtype_engine.checkpoint.weight_files import PICKLES
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import open_regular

FileKind = Literal["safetensors", "pickle", "gguf"]
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""torch's pickled magic number 0x1950a86a20f9469cfc6c, with which every file begins that torch.save wrote before version 1.6."""


def kind_of(path: Path) -> FileKind | None:
    """Return the kind of a weights file: "safetensors", "pickle" or "gguf". Returns None for any other file, and if the file is not
    a regular file or can't be read.
    """
    suffix = path.suffix
    if suffix == ".safetensors":
        return "safetensors"
    if suffix == ".gguf":
        return "gguf"
    return "pickle" if suffix in PICKLES else _by_content(path)


def _by_content(path: Path) -> FileKind | None:
    try:
        with open_regular(path) as file:
            start = file.read(1024)
            size = os.fstat(file.fileno()).st_size
    except (OSError, UserError):
        return None
    if start.startswith(b"GGUF"):
        return "gguf"
    if start.startswith(LEGACY_START) or (
        start.startswith(b"PK\x03\x04") and _first_name(start).endswith(b"/data.pkl")
    ):
        return "pickle"
    header = int.from_bytes(start[:8], "little")
    return "safetensors" if start[8:9] == b"{" and 8 + header <= size and header <= LONGEST_HEADER else None


def _first_name(archive: bytes) -> bytes:
    return archive[30 : 30 + int.from_bytes(archive[26:28], "little")]
