"""A terminal behind a line of so many bytes a second, that says where its cursor is once it has got so far as to be asked."""

from __future__ import annotations

import os
import re
import select
import time

from tests.helpers.terminal import Terminal, clean

BAUD_9600 = 960
"""Bytes a second: ten bits for each."""
_BEGUN_SEQUENCE = re.compile(rb"\x1b(?:\[[<>=?]?[0-9;]*\$?|\][^\x07\x1b]*\x1b?)?\Z")


class ThrottledTerminal(Terminal):
    """rate: bytes a second that arrive, None for as many as there are. answers: whether the terminal tells where its cursor is."""

    def __init__(
        self,
        *arguments: str,
        rate: float | None = BAUD_9600,
        answers: bool = True,
        size: tuple[int, int] = (80, 24),
        environment: dict[str, str] | None = None,
        forked: bool = False,
    ) -> None:
        self.rate = rate
        self._answers = answers
        self._free_at = time.perf_counter()
        self._begun = b""
        super().__init__(*arguments, size=size, environment=environment, forked=forked)

    def _answer(self, data: str) -> None:
        if self._answers:
            super()._answer(data)

    def read(self, seconds: float = 0.05) -> int:
        """Take in what arrives within `seconds`, a few bytes at a time; their number."""
        until = time.perf_counter() + seconds
        while (now := time.perf_counter()) < self._free_at:
            if now >= until:
                return 0
            time.sleep(min(until, self._free_at) - now)
        if not select.select([self.keyboard], [], [], max(0.0, until - time.perf_counter()))[0]:
            return 0
        try:
            data = os.read(self.keyboard, 1 << 16 if self.rate is None else max(1, int(self.rate / 100)))
        except OSError:
            return 0
        if self.rate is not None:
            # A line that had nothing to carry is not the faster for it.
            self._free_at = max(self._free_at, time.perf_counter() - 0.02) + len(data) / self.rate
        self.raw += data
        data = self._begun + data
        begun = _BEGUN_SEQUENCE.search(data)
        data, self._begun = (data[: begun.start()], data[begun.start() :]) if begun else (data, b"")
        self._stream.feed(clean(data))
        return len(data)

    def cursor_row(self) -> int | None:
        """The row of the module tree's cursor that is drawn whole, reversed from end to end; None while it is not."""
        rows = [row for row, line in enumerate(self.screen.display) if line.startswith("❯")]
        if len(rows) != 1:
            return None
        line = self.screen.buffer[rows[0]]
        elsewhere = any(self.screen.buffer[row][0].reverse for row in range(self.screen.lines) if row != rows[0])
        whole = all(line[column].reverse for column in range(40))
        return rows[0] if whole and not elsewhere else None

    def seconds_until_it_stands(self, key: str, row: int, seconds: float = 120) -> float:
        """From a key to the tree's cursor in `row`."""
        begun = time.perf_counter()
        self.press(key)
        while self.cursor_row() != row:
            if time.perf_counter() - begun > seconds:
                raise AssertionError(f"the cursor is in row {self.cursor_row()}, not {row}:\n{self.text}")
            self.read(0.02)
        return time.perf_counter() - begun

    def settle(self, quiet: float = 1.5, seconds: float = 240) -> float:
        """Read until nothing has come for `quiet` seconds; the seconds it took."""
        begun = last = time.perf_counter()
        while time.perf_counter() - last < quiet:
            if self.read(0.05):
                last = time.perf_counter()
            assert last - begun < seconds, self.text
        return last - begun
