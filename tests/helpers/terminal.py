"""A pseudo-terminal with the installed program in it, and a pyte screen that shows what a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pyte
from tests.helpers import preloaded

PROGRAM = str(Path(sys.executable).with_name("dtype-tui"))
QUICK = ("--sequences", "1", "--floor", "never")
"""Options with which the demo is ready in half of the time, for tests in which no figure counts."""
WITH_ENGINE = """
import json, sys
from dtype_engine.service import connection
sys.argv[0], command = sys.argv.pop(1), tuple(json.loads(sys.argv.pop(1)))
connection.COMMAND = command
made = connection.EngineCommand.__init__
made.__defaults__ = (command, *made.__defaults__[1:])
from dtype_tui.__main__ import main
main()
"""
"""The program, but for the command that starts its engine: an argument after the program's name and before its own."""
_ON_TERMINAL = """
import fcntl, os, sys, termios
sys.path.remove('')
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
"""
"""Before it, where it is forked from a process that has neither."""
# Modes and queries that pyte does not know and would print: kitty's keyboard, synchronised output, titles.
_UNKNOWN_TO_PYTE = re.compile(rb"\x1b\[[<>=?][0-9;]*[a-zA-Z$]+|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


def with_engine(engine: Sequence[str]) -> tuple[str, ...]:
    """The command that runs the program with this command for its engine."""
    return (sys.executable, "-P", "-c", WITH_ENGINE, PROGRAM, json.dumps(engine))


def clean(written: bytes) -> bytes:
    """What a program wrote, without what pyte does not know."""
    return _UNKNOWN_TO_PYTE.sub(b"", written)


class Terminal(contextlib.AbstractContextManager["Terminal"]):
    """Runs `dtype-tui` with arguments in a terminal of `size` (columns, rows).

    first: as somebody who never did before. forked: program and engine come from a process that has imported what they need, torch
    too, which is five seconds' work.
    engine: the command that starts its engine, in place of its own.
    answers: whether the terminal answers a program's questions, such as where its cursor is.
    """

    def __init__(
        self,
        *arguments: str,
        size: tuple[int, int] = (120, 36),
        environment: dict[str, str] | None = None,
        first: bool = False,
        forked: bool = False,
        engine: Sequence[str] | None = None,
        answers: bool = True,
    ) -> None:
        if forked and any(name.startswith("PYTHON") for name in environment or ()):  # read when an interpreter starts
            engine, forked = preloaded.command(preloaded.ENGINE), False
        program = (PROGRAM,) if engine is None else with_engine(engine)
        self.screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._lines: dict[int, str] = {}
        self._state = tempfile.mkdtemp()
        if not first:
            state = Path((environment or {}).get("XDG_STATE_HOME", self._state), "dtype-tui")
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            (state / "tour-offered").touch()
        self.started = time.perf_counter()
        # Opened by hand and not by pty.fork, so that the terminal can still be asked after the program has ended.
        self.keyboard, self.slave = pty.openpty()
        fcntl.ioctl(self.keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.settings = termios.tcgetattr(self.slave)
        if answers:
            self.screen.write_process_input = self._answer
        # An environment of its own: readline, where the tests' process has it, exports COLUMNS behind Python's back.
        given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        # Nothing of this machine's: no configuration, no models in a cache, no sessions kept by earlier tests.
        own = {"TERM": "xterm-256color", "HF_HUB_CACHE": "/nowhere", "XDG_CONFIG_HOME": "/nowhere"}
        own["XDG_STATE_HOME"] = self._state
        given |= own | (environment or {})
        self._forked = None
        if forked:
            command = (PROGRAM, json.dumps(preloaded.command(preloaded.ENGINE)), *arguments)
            self._forked = preloaded.Forked(_ON_TERMINAL + WITH_ENGINE, command, given, [self.slave] * 3)
            self.pid = self._forked.pid
            return
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)
            for number in (0, 1, 2):
                os.dup2(self.slave, number)
            os.execve(program[0], [*program, *arguments], given)

    def _answer(self, data: str) -> None:
        """What a terminal that is asked where its cursor is says, as all that people use do."""
        with contextlib.suppress(OSError):
            os.write(self.keyboard, data.encode())

    def read(self, seconds: float = 0.05) -> int:
        """Take in what the program writes within `seconds`; the number of bytes."""
        data = self.take(seconds)
        self.show(data)
        return len(data)

    def take(self, seconds: float) -> bytes:
        """What the program writes within `seconds`, which is not shown yet: pyte takes longer to show it than to read it."""
        if not select.select([self.keyboard], [], [], seconds)[0]:
            return b""
        try:
            return os.read(self.keyboard, 1 << 16)
        except OSError:
            return b""

    def show(self, data: bytes) -> None:
        """Show what `take` returned."""
        self.raw += data
        self._stream.feed(clean(data))

    @property
    def text(self) -> str:
        """The lines of the screen. Only those that changed since the last call are put together again: `pyte.Screen.display`
        measures the width of every character, which takes longer than what the program does meanwhile.
        """
        for row in self.screen.dirty:
            if row < self.screen.lines:
                line = self.screen.buffer[row]
                # The second cell of a wide character is empty.
                self._lines[row] = "".join(line[column].data for column in range(self.screen.columns)).rstrip()
        self.screen.dirty.clear()
        return "\n".join(self._lines.get(row, "") for row in range(self.screen.lines))

    def wait_for(self, pattern: str, seconds: float = 240) -> float:
        """Read until the screen matches; the seconds it took. Fails with the screen otherwise."""
        begun = time.perf_counter()
        while not re.search(pattern, self.text):
            if time.perf_counter() - begun > seconds:
                raise AssertionError(f"never saw {pattern!r} on this screen:\n{self.text}")
            self.read()
        return time.perf_counter() - begun

    def read_until(self, condition: Callable[[], object], seconds: float = 20) -> None:
        """Read until the condition holds. Fails with the screen otherwise."""
        until = time.perf_counter() + seconds
        while not condition():
            assert time.perf_counter() < until, self.text
            self.read()

    def suspend(self, seconds: float = 10) -> None:
        """Press the key that suspends, and wait until it has."""
        self.press("\x1a")
        self.read_until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED, seconds)

    def press(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        fcntl.ioctl(self.keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)

    def ended(self) -> int | None:
        """The exit status of the program, or None while it runs."""
        if self._forked is not None:
            return self._forked.status(0)
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    def exit_status(self, seconds: float = 60) -> int:
        """Wait for the program's end; its exit status."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self.read()
            status = self.ended()
            if status is not None:
                while self.read(0.01):
                    pass
                return status
        raise AssertionError(f"the program did not end; its screen:\n{self.text}")

    def is_restored(self) -> bool:
        """Whether the terminal is as it was: the same settings, the main screen, the cursor to be seen."""
        same = termios.tcgetattr(self.slave)[:4] == self.settings[:4]
        left = self.raw.rfind(b"\x1b[?1049l") > self.raw.rfind(b"\x1b[?1049h")
        shown = self.raw.rfind(b"\x1b[?25h") > self.raw.rfind(b"\x1b[?25l")
        return same and left and shown

    def leave(self) -> None:
        """Press the key that leaves: the program ends without an error, and the terminal is as it was."""
        self.press("q")
        assert self.exit_status() == 0
        assert self.is_restored()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.kill(self.pid, number)
                self.exit_status(5)
            except (ProcessLookupError, ChildProcessError):
                break
            except AssertionError:
                continue
            break
        os.close(self.keyboard)
        os.close(self.slave)
        shutil.rmtree(self._state, ignore_errors=True)


Opener = Callable[..., Terminal]
"""Opens a program as `Terminal` does; its test need not close it."""
