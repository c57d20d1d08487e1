"""Textual's driver for a terminal, that asks the terminal how far it has got."""

from __future__ import annotations

import os
import threading
import time

from textual.drivers import linux_driver
from textual.drivers.linux_driver import LinuxDriver
from textual.events import CursorPosition
from textual.message import Message

from dtype_tui.process.key_parser import KeyParser
from dtype_tui.process.line_pace import LinePace

# The driver makes its parser inside the thread that reads, by this name: there is no other place to give it one.
linux_driver.XTermParser = KeyParser  # type: ignore[attr-defined]
_WHERE_IS_THE_CURSOR = "\x1b[6n"


class PacedDriver(LinuxDriver):
    """Asks twice at the start, so that a slow line is known before the first frame: between both are some seventy bytes, which at
    9,600 baud take as many milliseconds. Nothing is asked where input or output is no terminal.
    """

    pace: LinePace
    """Anew whenever the terminal is taken over: it may be another one after a pause."""
    written = 0
    """Bytes since the start."""

    def start_application_mode(self) -> None:
        self.pace = LinePace()
        self._asked_after = self.written
        self._nothing_to_come = threading.Event()
        self._nothing_to_come.set()
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self.ask()

    def _request_terminal_sync_mode_support(self) -> None:
        # The first place after the terminal was told not to echo, which it would do with its answer.
        self.ask()
        super()._request_terminal_sync_mode_support()

    def write(self, data: str) -> None:
        self.written += len(data)
        super().write(data)

    def ask(self, sent: int | None = None) -> None:
        """Ask where the cursor is, after `sent` bytes: all since the last question, where it is left out."""
        if not (self.input_tty and self._file is not None and os.isatty(self._file.fileno())):
            return
        self._nothing_to_come.clear()
        self.write(_WHERE_IS_THE_CURSOR)
        self.pace.asked(time.monotonic(), self.written - self._asked_after if sent is None else sent)
        self._asked_after = self.written

    def ask_after_frame(self, sent: int) -> None:
        """Ask after a frame of so many bytes where it is worth it: a line may become slow later."""
        if self.pace.worth_asking(time.monotonic(), sent):
            self.ask(sent)

    def process_message(self, message: Message) -> None:
        if isinstance(message, CursorPosition):
            self.pace.answered(message.time)
            if not self.pace.waiting:
                self._nothing_to_come.set()
        super().process_message(message)

    def stop_application_mode(self) -> None:
        # An answer that came later would be typed into the shell.
        if self.pace.answers:
            self._nothing_to_come.wait(self.pace.patience())
        super().stop_application_mode()
