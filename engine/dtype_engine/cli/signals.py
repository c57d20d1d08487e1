"""How a command ends when it is told to: as ctrl+c ends it, so that what was begun is removed, with an exit status of its own.

The status is 128 and the number of the signal, which is also what a shell gives for a program that the signal itself has ended: 130
for ctrl+c, 143 for a plain kill, 129 for a hang-up, at whatever moment it comes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class EndedBySignal(KeyboardInterrupt):
    """The system or another program told this one to end; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def ended_by(error: BaseException) -> int:
    """The number of the signal that an interruption came from; click has one of its own, raised from ours."""
    cause = error if isinstance(error, EndedBySignal) else error.__cause__
    return cause.number if isinstance(cause, EndedBySignal) else signal.SIGINT


@contextmanager
def raised_signals() -> Iterator[None]:
    """Within the block a hang-up or a plain kill raises `EndedBySignal`. A signal that is ignored, as under nohup, stays so."""
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
