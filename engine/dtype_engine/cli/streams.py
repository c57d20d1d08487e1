"""Manages the standard streams: only a command's result goes to standard output, and a failure to write it is an error."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

from dtype_engine.core.errors import UserError

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
_answers: list[TextIO] = []
"""The streams to which running commands write their results. A command may run another one; the innermost command is last."""


class ReaderGone(Exception):
    """Raised if the reader of standard output, such as `head`, has closed it. The program must end silently, as by SIGPIPE."""


class _StandardOutput(io.FileIO):
    """A copy of standard output that raises ReaderGone or UserError if a write fails. If it raised OSError, click could not tell
    this from an OSError about a model's files, and would end the program.

    After an error it discards all output, because Python flushes the buffer once more at exit.
    """

    def __init__(self) -> None:
        super().__init__(os.dup(1), "w")
        self._failed = False

    def write(self, data: Any, /) -> int:
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
    """Open /dev/null in place of each standard stream that was closed when Python started. Otherwise the next file that is opened
    would get the stream's descriptor.
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


def replace_unusable_encodings() -> None:
    """Write ASCII with escapes to a standard stream whose encoding can't write lines of ASCII, as PYTHONIOENCODING=idna can't."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            try:
                ("x" * 100 + "\n").encode(stream.encoding)
            except UnicodeError:
                stream.reconfigure(encoding="ascii", errors="backslashreplace")


def drop_unwritten() -> None:
    """Discard output that standard error can't write. Otherwise Python would try again at exit, fail, and exit with status 120."""
    try:
        sys.stderr.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)


@contextmanager
def own_output() -> Iterator[None]:
    """A context manager that replaces `sys.stdout` by a copy that raises ReaderGone or UserError if a write fails. If it was
    replaced before, it stays as it is. The block must flush the copy, because errors of the flush after the block are ignored.

    Characters that the encoding lacks are written as escapes, such as `\\u0394`, as Python does on standard error.
    """
    before = sys.__stdout__
    if before is None or sys.stdout is not before or before.fileno() != 1:
        yield
        return
    before.flush()
    ours = io.TextIOWrapper(
        io.BufferedWriter(_StandardOutput()), before.encoding, "backslashreplace", line_buffering=before.line_buffering
    )
    try:
        with redirect_stdout(ours):
            yield
    finally:
        with suppress(ReaderGone, UserError, OSError):
            ours.close()


@contextmanager
def answers_alone() -> Iterator[None]:
    """A context manager in which only `answer` writes to standard output. All other code, such as a model's, writes to standard
    error.

    C code and child processes write to file descriptor 1, and may do so as late as the end of the process. If `own_output` has made
    a copy, descriptor 1 is therefore redirected to standard error for good.
    """
    before = sys.stdout
    if isinstance(getattr(getattr(before, "buffer", None), "raw", None), _StandardOutput):
        os.dup2(2, 1)
    _answers.append(before)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.pop()


def answers_can_hold(text: str) -> bool:
    """Return whether the encoding of the stream that `answers` returns has all characters of a text."""
    try:
        text.encode(getattr(answers(), "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def answers() -> TextIO:
    """Return the stream to which the running command writes its result."""
    return _answers[-1] if _answers else sys.stdout
