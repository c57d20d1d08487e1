"""Keys and clicks at random, as fast as the app takes them, in a real pseudo-terminal.

`python -m tests.terminal.random_keys SEED [COUNT]` presses COUNT (20,000), and prints the memory every 2,000 and which of Textual's
own faults the app passed over. Exit status 1 when the app ends, is not in its terminal any more, or does not answer afterwards.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
from tests.helpers.terminal import Terminal

_PLAIN = "jklhJKGHEWR<>[]{}nNzyYwvxucmdafgtsopei,?:/b *=.12345678\r\t \x10\x12\x7f"  # all keys but the one that leaves
_PALETTE = "\x10"
_MOVES = ("\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D", "\x1b[5~", "\x1b[6~", "\x1b[H", "\x1b[F", "\x1b[Z")
_EVERY = 100
_QUIET_S = 0.3
_BUSY_BYTES = 400
"""The most bytes that are written at a time while a measurement goes on. A key that changes the screen causes more."""
_WHOLE_BYTES = 1500
"""Fewer bytes than the emptiest screen takes if it is drawn in full."""


def a_key(chance: random.Random) -> str:
    """Return a random key, one to three clicks on one cell, or a turn of the mouse wheel."""
    kind = chance.random()
    if kind < 0.1:
        return chance.choice(_MOVES)
    if kind < 0.18:
        at = f"{chance.randint(1, 120)};{chance.randint(1, 36)}"
        if kind > 0.16:
            return f"\x1b[<64;{at}M"
        return f"\x1b[<0;{at}M\x1b[<0;{at}m" * chance.choice((1, 1, 2, 3))
    return "\x1b" if kind < 0.3 else chance.choice(_PLAIN)


class Unwatched(Terminal):
    """A terminal whose screen is not emulated while keys are pressed: that would take longer than the app takes."""

    watched = True

    def read(self, seconds: float = 0.05) -> int:
        if self.watched:
            return super().read(seconds)
        stream, self._stream = self._stream, _Nowhere()  # type: ignore[assignment]
        try:
            return super().read(seconds)
        finally:
            self._stream = stream
            self.raw = self.raw[-100_000:]

    @property
    def logs(self) -> list[str]:
        """The last line of every error that the app wrote to a file of its own."""
        return [log.read_text().strip().splitlines()[-1] for log in Path(self._state).glob("dtype-tui/error*")]

    @property
    def last_log(self) -> str:
        """The text of the newest error file, or "" if there is none."""
        logs = sorted(Path(self._state).glob("dtype-tui/error*"))
        return logs[-1].read_text() if logs else ""


class _Nowhere:
    def feed(self, data: bytes) -> None:
        pass


def storm(seed: int, count: int) -> tuple[list[int], list[str]]:
    """Press `count` keys. Returns the resident MiB during the run, and the errors that the app survived. Raises AssertionError if
    the app ends.
    """
    chance = random.Random(seed)
    terminal = _opened()
    try:
        process, memory, pressed, recent = psutil.Process(terminal.pid), [], 0, ""
        while pressed < count:
            burst = chance.choice((1, 1, 1, 2, 3, 8))
            keys = "".join(a_key(chance) for _ in range(burst))
            recent = (recent + keys)[-2000:]
            terminal.press(keys)
            before, pressed = pressed, pressed + burst
            while terminal.read(0.004):
                pass
            if pressed // _EVERY != before // _EVERY:
                _until_quiet(terminal)
                status = terminal.ended()
                gone = f"ended after {pressed} keys with {status}"
                if status == 0 and _PALETTE in recent and terminal.is_restored():
                    terminal.close()  # the palette has an entry that quits
                    terminal, recent = _opened(), ""
                    process = psutil.Process(terminal.pid)
                    continue
                assert status is None, f"{gone}, the last {recent!r}; {terminal.logs}\n{terminal.last_log}"
                _bring_to_the_front(process)
                answers = _draws_anew(terminal, 120 + pressed // _EVERY % 2)
                assert answers, f"no answer after {pressed} keys, the last {recent!r}; {terminal.logs}"
            if pressed // 2000 != before // 2000:
                memory.append(process.memory_info().rss >> 20)
        # On a busy machine keys still wait. If one of them suspended the app, it would later read several Escapes as other keys.
        _until_quiet(terminal)
        _bring_to_the_front(process)
        for _ in range(12):  # whatever stands on top closes, and then the tree answers
            terminal.press("\x1b")
            time.sleep(0.3)  # two at once would be another key
            while terminal.read(0.01):
                pass
        _bring_to_the_front(process)
        terminal.watched = True
        terminal.screen.reset()
        terminal.resize(122, 36)  # everything is drawn anew
        terminal.wait_for("module +dtype", 60)
        logs = terminal.logs
        status = _left(terminal)
        assert status == 0, f"left with {status}; resident MiB {memory}; {terminal.logs}; {terminal.text[-1500:]}"
        assert terminal.is_restored()
        return memory, logs
    finally:
        terminal.close()


def _opened() -> Unwatched:
    terminal = Unwatched("demo", forked=True)
    terminal.wait_for("embed_tokens", 120)
    terminal.watched = False
    return terminal


def _bring_to_the_front(process: psutil.Process) -> None:
    """Continue the app if it is stopped, as the shell's `fg` does: an entry of the palette suspends it."""
    if process.status() == psutil.STATUS_STOPPED:
        process.send_signal(signal.SIGCONT)


def _draws_anew(terminal: Terminal, columns: int) -> bool:
    """Resize the terminal. Returns whether the app notices it, which it shows by drawing the whole screen."""
    terminal.resize(columns, 36)
    until, size = time.monotonic() + 60, 0
    while size < _WHOLE_BYTES and time.monotonic() < until:
        size += terminal.read(0.05)
    return size >= _WHOLE_BYTES


def _left(terminal: Terminal) -> int:
    """Press the key that leaves until the program ends; its exit status. A window that opens by itself, because the answer to an
    earlier key arrives, takes the first `q`.
    """
    for _ in range(6):
        time.sleep(1)  # right after an Escape it would be another key
        terminal.press("q")
        until = time.monotonic() + 10
        while time.monotonic() < until:
            terminal.read()
            if (status := terminal.ended()) is not None:
                while terminal.read(0.01):
                    pass
                return status
        terminal.press("\x1b")
    return terminal.exit_status(30)


def _until_quiet(terminal: Terminal) -> None:
    until = quiet = time.monotonic()
    until += 4
    while time.monotonic() < until and time.monotonic() - quiet < _QUIET_S:
        if terminal.read(0.05) > _BUSY_BYTES:
            quiet = time.monotonic()


if __name__ == "__main__":
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # what the keys write goes here
        resident, passed_over = storm(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20_000)
    print(f"seed {sys.argv[1]}: alive after {time.monotonic() - started:.0f} s; resident MiB {resident}; {passed_over}")
