"""Lets a signal end a command: SIGTERM and SIGHUP raise an exception, as ctrl+c does, so that unfinished files are removed.

The exit status is 128 plus the number of the signal, as shells report it for a program that a signal ended: 130 for ctrl+c, 143 for
SIGTERM, 129 for SIGHUP.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class EndedBySignal(KeyboardInterrupt):
    """Raised when a signal asks this program to end. `number` is the number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def ended_by(error: BaseException) -> int:
    """Return the number of the signal that interrupted the program. error: an `EndedBySignal`, or an exception that was raised from
    one, such as click's `Abort`. Any other exception counts as SIGINT.
    """
    cause = error if isinstance(error, EndedBySignal) else error.__cause__
    return cause.number if isinstance(cause, EndedBySignal) else signal.SIGINT


@contextmanager
def raised_signals() -> Iterator[None]:
    """A context manager. While its block runs, SIGHUP and SIGTERM raise `EndedBySignal`. A signal that is ignored, as under nohup,
    stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise EndedBySignal(number)

    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
