"""A terminal at the far end of a slow line: what either side sends arrives later, and only so many bytes a second."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections import deque

from tests.helpers.terminal import Terminal, clean

_UNFINISHED_SEQUENCE = re.compile(rb"\x1b(?:\[[<>=?]?[0-9;]*\$?|\][^\x07\x1b]*\x1b?)?\Z")


class ThrottledTerminal(Terminal):
    """rate: bytes a second that the line carries to the terminal. delay: seconds that anything is under way in one direction.

    The line takes all that the program writes and lets it queue, as the buffers of an SSH connection do: a program that writes
    more than the line carries gets no sign of it, and what it writes next waits behind that.
    """

    def __init__(
        self,
        *arguments: str,
        rate: float = 50_000,
        delay: float = 0.1,
        size: tuple[int, int] = (120, 36),
        environment: dict[str, str] | None = None,
        forked: bool = False,
        answers: bool = True,
    ) -> None:
        self._rate = rate
        self._delay = delay
        self._free_at = 0.0
        """When the line will have carried all that was written so far."""
        self._to_terminal: deque[tuple[float, bytes]] = deque()
        self._to_program: deque[tuple[float, bytes]] = deque()
        self._unfinished = b""
        self.longest_queue_s = 0.0
        """The longest that anything has waited for the line since this was set to 0."""
        super().__init__(*arguments, size=size, environment=environment, forked=forked, answers=answers)

    def press(self, keys: str) -> None:
        self._to_program.append((time.perf_counter() + self._delay, keys.encode()))

    def _answer(self, data: str) -> None:
        self.press(data)

    def read(self, seconds: float = 0.05) -> int:
        """Carry both directions for up to `seconds`, until something arrives at the terminal; the bytes that did."""
        until = time.perf_counter() + seconds
        while True:
            self._take_written()
            now = time.perf_counter()
            while self._to_program and self._to_program[0][0] <= now:
                with contextlib.suppress(OSError):  # the program has ended
                    os.write(self.keyboard, self._to_program.popleft()[1])
            arrived = b""
            while self._to_terminal and self._to_terminal[0][0] <= now:
                arrived += self._to_terminal.popleft()[1]
            if arrived:
                self.show(arrived)
            if arrived or now >= until:
                return len(arrived)
            due = [queue[0][0] for queue in (self._to_terminal, self._to_program) if queue]
            wait = max(0.0, min([until, *due]) - now)
            select.select([self.keyboard], [], [], wait)

    def exit_status(self, seconds: float = 60) -> int:
        status = super().exit_status(seconds)
        self._take_written()
        while self._to_terminal:  # what the program wrote last is still under way when it has ended
            self.read(self._delay)
        return status

    def _take_written(self) -> None:
        while select.select([self.keyboard], [], [], 0.0)[0]:
            try:
                data = os.read(self.keyboard, 512)
            except OSError:  # the program has ended
                return
            now = time.perf_counter()
            begins = max(now, self._free_at)
            self.longest_queue_s = max(self.longest_queue_s, begins - now)
            self._free_at = begins + len(data) / self._rate
            self._to_terminal.append((self._free_at + self._delay, data))

    def show(self, arrived: bytes) -> None:
        self.raw += arrived
        data = self._unfinished + arrived
        unfinished = _UNFINISHED_SEQUENCE.search(data)
        data, self._unfinished = (data[: unfinished.start()], unfinished.group()) if unfinished else (data, b"")
        self._stream.feed(clean(data))

    def cursor_row(self) -> int | None:
        """The row of the module tree's cursor that is drawn whole, in one tint to the end of its name; None while it is not."""
        rows = [row for row, line in enumerate(self.text.split("\n")) if line.startswith("▌")]
        if len(rows) != 1:
            return None
        tint = self.screen.buffer[rows[0]][0].bg
        elsewhere = any(self.screen.buffer[row][1].bg == tint for row in range(self.screen.lines) if row != rows[0])
        whole = all(self.screen.buffer[rows[0]][column].bg == tint for column in range(20))
        return rows[0] if whole and not elsewhere else None

    def seconds_until_it_stands(self, key: str, row: int, seconds: float = 60) -> float:
        """From a key to the tree's cursor in `row`."""
        begun = time.perf_counter()
        self.press(key)
        while self.cursor_row() != row:
            if time.perf_counter() - begun > seconds:
                raise AssertionError(f"the cursor is in row {self.cursor_row()}, not {row}:\n{self.text}")
            self.read(0.02)
        return time.perf_counter() - begun
