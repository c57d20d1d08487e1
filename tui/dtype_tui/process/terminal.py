"""Detects that the terminal is gone, or that the browser was closed."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable


def exit_on_terminal_loss(on_exit: Callable[[], None]) -> None:
    """Call `on_exit` and then `os._exit` when the terminal is gone.

    Without this, the program would wait forever: the hang-up signal does not end it, and Textual's writer thread fails with an
    OSError, so that the queue of this thread fills up.
    """
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if (
            isinstance(failed.exc_value, OSError)
            and failed.thread is not None
            and failed.thread.name == "textual-output"
        ):
            try:
                on_exit()
            finally:
                os._exit(128 + signal.SIGHUP)
        before(failed)

    threading.excepthook = hook


def server_disconnected() -> bool:
    """Return whether the web server has closed its end of this process's standard input, for an app that runs in a browser. Textual
    does not check this, and an app that can't be reached would keep its model in memory forever.
    """
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLHUP)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
