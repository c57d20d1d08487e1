"""The terminal that goes away, and the browser that is closed."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable


def exit_on_terminal_loss(on_exit: Callable[[], None]) -> None:
    """Exit when the terminal is gone: call `on_exit`, then `os._exit`.

    Textual's thread that writes ends with an error then, its queue fills, and the whole program waits for ever: a hang-up signal
    is not enough to end it.
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
    """Whether the server closed the other end of standard input, where the app is served to a browser. Textual does not check,
    and an app that nobody can reach would keep its model in memory for ever.
    """
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLHUP)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
