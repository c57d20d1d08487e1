"""Files that somebody names: opened only where they are plain files, so that a pipe or a device holds nothing up."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dtype_engine.core.errors import UserError

_PIECE_BYTES = 1 << 20


def open_regular(path: Path) -> BinaryIO:
    """A file opened for reading. Raises UserError for what is no plain file (a named pipe would be waited for, a device
    might never end), and OSError where it can't be opened.
    """
    _refuse_special(path, os.stat(path))
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _refuse_special(path, os.fstat(number))  # another may stand there by now
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """All of a file. Raises UserError as `open_regular` does, and for one of more than `most` bytes; OSError."""
    content = bytearray()
    with open_regular(path) as file:
        # To ask for all that it may have at once would take so much memory for a small file, too.
        while len(content) <= most and (piece := file.read(_PIECE_BYTES)):
            content += piece
    if len(content) > most:
        raise UserError(f"{path} has over {most:,} bytes, which are too many for such a file")
    return bytes(content)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Raise UserError where reading `what`, a path or words with one, fails with an OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"can't read {what}: {error.strerror}") from None


def _refuse_special(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise UserError(f"{path} is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a regular file")


def read_text(path: Path) -> str:
    """A text file. Raises UserError that says what is wrong with it."""
    try:
        with reading(path), open_regular(path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8").read()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text (UTF-8)") from None
    if not text.strip():
        raise UserError(f"{path} is empty")
    return text
