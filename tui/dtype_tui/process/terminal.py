"""Restores the terminal before a sudden end, and detects that the terminal is gone or that the browser was closed."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from textual.driver import Driver

_RESTORES = b"".join(
    (
        b"\x1b[?2004l",  # bracketed paste off
        b"\x1b[?7h",  # lines wrap
        b"\x1b[?2048l",  # reports of the window's size off
        *(b"\x1b[?%dl" % mode for mode in (1000, 1003, 1015, 1006)),  # mouse off
        b"\x1b[<u",  # kitty's keyboard protocol off
        b"\x1b[?1049l",  # the main screen
        b"\x1b[?25h",  # the cursor is visible
        b"\x1b[?1004l",  # reports of the focus off
    )
)
"""The control sequences that undo Textual's application mode, like those of its `LinuxDriver.stop_application_mode`."""


def terminal_settings() -> list[Any] | None:
    """Return the terminal's attributes (`termios.tcgetattr`), or None if standard error is not a terminal."""
    with suppress(termios.error, OSError, ValueError):
        if sys.__stderr__ is not None:
            return termios.tcgetattr(sys.__stderr__.fileno())
    return None


def restore_at_once(settings: list[Any] | None) -> None:
    """Restore the terminal, and drop output that it has not taken yet. settings: the `terminal_settings` from before the app."""
    with suppress(termios.error, OSError, ValueError):  # the terminal is gone
        assert sys.__stderr__ is not None  # to which Textual writes
        number = sys.__stderr__.fileno()
        os.set_blocking(number, False)  # so that Textual's thread, if it waits in a write, does not write on
        if settings is not None:
            termios.tcsetattr(number, termios.TCSANOW, settings)
        for _ in range(20):
            termios.tcflush(number, termios.TCOFLUSH)
            with suppress(BlockingIOError):
                if os.write(number, _RESTORES) == len(_RESTORES):
                    return
            time.sleep(0.01)


def exit_on_terminal_loss(on_exit: Callable[[], None]) -> None:
    """Call `on_exit` and then `os._exit` when the terminal is gone.

    Otherwise the program would wait forever: the hang-up signal does not end it, and Textual's writer thread fails with an OSError,
    so that its queue fills up.
    """
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if (
            isinstance(failed.exc_value, OSError)
            and not isinstance(failed.exc_value, BlockingIOError)  # `restore_at_once` is ending the process
            and failed.thread is not None
            and failed.thread.name == "textual-output"
        ):
            try:
                on_exit()
            finally:
                os._exit(128 + signal.SIGHUP)
        before(failed)

    threading.excepthook = hook


def without_broken_pipes(driver: type[Driver]) -> type[Driver]:
    """Return a subclass of `driver` that drops what it writes after the web server has closed standard output. Otherwise a browser
    that was closed would end the app with a BrokenPipeError, as if the app had failed. `server_disconnected` ends it.
    """

    class WithoutBrokenPipes(driver):  # type: ignore[misc, valid-type]
        def write(self, data: str) -> None:
            with suppress(BrokenPipeError):
                super().write(data)

        def stop_application_mode(self) -> None:
            with suppress(BrokenPipeError):
                super().stop_application_mode()

    return WithoutBrokenPipes


def server_disconnected() -> bool:
    """Return whether the web server has closed standard input. Textual does not check this, and the app would run on."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLHUP)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
