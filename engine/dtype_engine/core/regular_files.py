"""Opens files that the user names, but only regular files: reading a pipe or a device could block forever."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dtype_engine.core.errors import UserError, exhausted
from dtype_engine.core.input_limits import BYTES_PER_TOKEN, InputLimits

_PIECE_BYTES = 1 << 20


def open_regular(path: Path) -> BinaryIO:
    """Return a regular file, opened for reading. Raises UserError for anything else, and OSError if opening fails."""
    _refuse_special(path, os.stat(path))
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _refuse_special(path, os.fstat(number))  # another file may have replaced it since the first check
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """Return the whole content of a regular file. Raises UserError if it exceeds `most` bytes, and OSError."""
    content = bytearray()
    with open_regular(path) as file:
        # A single read of `most` bytes would allocate that much memory even for a small file.
        while len(content) <= most and (piece := file.read(_PIECE_BYTES)):
            content += piece
    if len(content) > most:
        raise UserError(f"{path} has over {most:,} bytes, which are too many for such a file")
    return bytes(content)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """A context manager that turns an OSError into a UserError, which says "can't read `what`"."""
    try:
        yield
    except OSError as error:
        raise UserError(f"can't read {what}: {exhausted(error) or error.strerror or error}") from None


def _refuse_special(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise UserError(f"{path} is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a regular file")


def read_text(path: Path, limits: InputLimits) -> str:
    """Return the content of a UTF-8 text file within `limits`. Raises UserError, also if it is empty."""
    try:
        with reading(path), open_regular(path) as file:
            tokens = os.fstat(file.fileno()).st_size / BYTES_PER_TOKEN
            limits.refuse_file("tokens", f"{path}, at {BYTES_PER_TOKEN} bytes per token,", tokens)
            text = io.TextIOWrapper(file, encoding="utf-8").read()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text (UTF-8)") from None
    if not text.strip():
        raise UserError(f"{path} is empty")
    return text
