"""Standard streams: only answers go to standard output, whatever a model's code prints. A failure to write one is an error."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from dtype_engine.core.errors import UserError

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""The streams and their modes; the index is the file descriptor."""
_answers: list[TextIO] = []
"""The streams for the answers of the running commands, the innermost last; empty where `sys.stdout` is used."""


class ReaderGone(Exception):
    """The reader of standard output has closed it. The program must end without a message, as SIGPIPE would end it."""


class _StandardOutput(io.FileIO):
    """A copy of standard output whose write errors are not OSErrors: an OSError could also come from a model's own files, and click
    would end the program for one. After an error it discards everything, since Python flushes the buffer once more at exit.
    """

    def __init__(self) -> None:
        super().__init__(os.dup(1), "w")
        self._failed = False

    def write(self, data: Any, /) -> int:
        """Write a bytes-like object. Raises ReaderGone where the reader is gone, and UserError for any other error."""
        if self._failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self._failed = True
            if isinstance(error, BrokenPipeError):
                raise ReaderGone from None
            raise UserError(f"standard output can't be written: {error.strerror}") from None


def fill_closed() -> None:
    """Replace each standard stream that was closed when Python started with /dev/null. Python and C code (torch's too) expects the
    streams to exist, and otherwise the next file that is opened would get the descriptor of the stream.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def drop_unwritten() -> None:
    """Discard what standard error can't write. Otherwise Python would try once more at exit, fail, and exit with status 120."""
    try:
        sys.stderr.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)


@contextmanager
def own_output() -> Iterator[None]:
    """Within the block `sys.stdout` is a copy of the current standard output that raises ReaderGone or UserError where a write
    fails. Flush it before the block ends, because errors are ignored there. A `sys.stdout` that a caller replaced is left alone.
    """
    before = sys.__stdout__
    if before is None or sys.stdout is not before or before.fileno() != 1:
        yield
        return
    before.flush()
    ours = io.TextIOWrapper(
        io.BufferedWriter(_StandardOutput()), before.encoding, before.errors, line_buffering=before.line_buffering
    )
    sys.stdout = ours
    try:
        yield
    finally:
        sys.stdout = before
        with contextlib.suppress(ReaderGone, UserError, OSError):
            ours.close()


@contextmanager
def answers_alone() -> Iterator[None]:
    """Within the block only `answer` writes to standard output. Other output, such as that of a model's code, goes to standard
    error.

    C code and child processes write to file descriptor 1 itself, some of them only when the process ends. Under `own_output` that
    descriptor therefore leads to standard error until the end of the process.
    """
    before = sys.stdout
    if isinstance(getattr(getattr(before, "buffer", None), "raw", None), _StandardOutput):
        os.dup2(2, 1)
    _answers.append(before)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = before
        _answers.pop()


def answers() -> TextIO:
    """The stream that answers are written to."""
    return _answers[-1] if _answers else sys.stdout
