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
"""torch's pickled magic number 0x1950a86a20f9469cfc6c, with which the files of torch.save before version 1.6 begin."""


def kind_of(path: Path) -> FileKind | None:
    """Return the kind of a weights file, or None if the file is of no such kind, is not regular or can't be read."""
    if path.suffix == ".safetensors":
        return "safetensors"
    if path.suffix == ".gguf":
        return "gguf"
    if path.suffix in PICKLES:
        return "pickle"
    try:
        with open_regular(path) as file:
            start = file.read(1024)
            size = os.fstat(file.fileno()).st_size
    except (OSError, UserError):
        return None
    if start.startswith(b"GGUF"):
        return "gguf"
    first_name = start[30 : 30 + int.from_bytes(start[26:28], "little")]  # in a zip archive
    if start.startswith(LEGACY_START) or (start.startswith(b"PK\x03\x04") and first_name.endswith(b"/data.pkl")):
        return "pickle"
    header = int.from_bytes(start[:8], "little")
    return "safetensors" if start[8:9] == b"{" and 8 + header <= size and header <= LONGEST_HEADER else None
