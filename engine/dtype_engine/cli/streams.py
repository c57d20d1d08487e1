"""Standard streams: answers alone go to standard output, whatever a model's code prints; where they can't, that is said."""

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
"""By their file descriptors."""
_answers: list[TextIO] = []
"""Where the answers of the commands under way go; nothing where that is `sys.stdout`."""


class NobodyReads(Exception):
    """Whoever read standard output has closed it: the program is to end without a word, as SIGPIPE would end it."""


class _StandardOutput(io.FileIO):
    """A second file descriptor of standard output, whose errors are no OSErrors: those of a model's own files can't be told apart
    from them, and click would end the program at one. After an error it takes all and writes nothing: Python writes what is
    left in the buffer as it ends.
    """

    def __init__(self) -> None:
        super().__init__(os.dup(1), "w")
        self._failed = False

    def write(self, data: Any, /) -> int:
        """data: anything with bytes. Raises NobodyReads, UserError."""
        if self._failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self._failed = True
            if isinstance(error, BrokenPipeError):
                raise NobodyReads from None
            raise UserError(f"standard output can't be written: {error.strerror}") from None


def fill_closed() -> None:
    """Put a stream that takes all and gives nothing in the place of each that was closed when Python began. There is code that
    expects one, torch's in C as well; and the next file that is opened would get the number of that stream.
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
    """Before the end: what standard error does not take goes nowhere. Python would try once more, and end with a status of 120."""
    try:
        sys.stderr.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)


@contextmanager
def own_output() -> Iterator[None]:
    """Within the block `sys.stdout` writes wherever file descriptor 1 leads now, and raises NobodyReads or UserError where it
    can't. Flush it before the end, which says no errors. A `sys.stdout` that a caller has put there is left.
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
        with contextlib.suppress(NobodyReads, UserError, OSError):
            ours.close()


@contextmanager
def answers_alone() -> Iterator[None]:
    """Within the block `answer` writes to standard output, and everything else that does, as a model's code, to standard error.

    What is in C writes to the file descriptor, at times from a buffer when the process ends, and so do the processes that are
    started: under `own_output` the descriptor stays standard error's for good.
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
    """Where answers go."""
    return _answers[-1] if _answers else sys.stdout
