"""Lets a signal end a command: SIGTERM and SIGHUP raise an exception, as ctrl+c does, so that unfinished files are removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class EndedBySignal(KeyboardInterrupt):
    """Signal `number` asks this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def ended_by(error: BaseException) -> int:
    """Return the number of the signal that interrupted the program. error: an `EndedBySignal`, or an exception that was raised from
    one, such as click's `Abort`. Any other counts as SIGINT.
    """
    cause = error if isinstance(error, EndedBySignal) else error.__cause__
    return cause.number if isinstance(cause, EndedBySignal) else signal.SIGINT


@contextmanager
def raised_signals() -> Iterator[None]:
    """While the block runs, SIGHUP and SIGTERM raise `EndedBySignal`, unless they are ignored, as under nohup."""
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
