"""How an engine in another process is started, and one connection to it: its standard input and output."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.text import printable

if TYPE_CHECKING:
    from dtype_engine.worker import control
    from dtype_engine.worker.frames import FrameReader
    from dtype_engine.worker.message import Message

COMMAND = (sys.executable, "-P", "-m", "dtype_engine.worker.stdio")
"""The engine of this machine. `-P`: no file of the working directory stands in for a library."""


THIS_MACHINE = "the engine"
"""What messages call an engine that needs no name: there is one, and it is here."""
SESSION = "{session}"
"""Stands in a command's arguments for what a lingering engine is found by again."""
_KEPT_OF_STDERR = 4096
ENGINE_ENDED = 70
"""Exit status of `dtype-engine stdio` where the lingering engine that it led to has ended by itself."""


class NoAnswer(UserError):
    """What was started ended without a word of dtype-engine's. status: its exit status, None where it still runs."""

    def __init__(self, message: str, status: int | None, words: str) -> None:
        super().__init__(message)
        self.status = status
        self.words = words


@dataclass(frozen=True)
class EngineCommand:
    """How to start an engine.

    arguments: with SESSION in them, it outlives a connection, and answers the same command again. name: what messages call it.
    compressed: its events come compressed. unattended: the arguments while the screen is open and nobody can be asked for a
    password; empty for the same as ever.
    """

    arguments: Sequence[str] = COMMAND
    name: str = THIS_MACHINE
    compressed: bool = False
    unattended: Sequence[str] = ()

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine, and so writes where this process can."""
        return self.name == THIS_MACHINE

    @property
    def lingers(self) -> bool:
        """Whether it outlives a connection."""
        return any(SESSION in argument for argument in self.arguments)

    def start(self, session: str = "", attended: bool = False) -> subprocess.Popen[bytes]:
        """Start it. session: letters and digits. attended: it may ask the user for a password. Raises UserError."""
        arguments = self.arguments if attended or not self.unattended else self.unattended
        try:
            return start_process([word.replace(SESSION, session) for word in arguments], own_group=not attended)
        except OSError as error:
            raise UserError(f"{printable(shlex.join(arguments), 200)}: {error.strerror}") from None


def new_session() -> str:
    """What one engine is found by again, and no other."""
    return os.urandom(10).hex()


def start_process(arguments: Sequence[str], own_group: bool = True) -> subprocess.Popen[bytes]:
    """Start a process with pipes for all three streams. own_group: the terminal's signals are not meant for it. Raises OSError."""
    return subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        process_group=0 if own_group else None,
    )


def signal_words(number: int) -> str:
    """What it may mean that a signal has ended an engine."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    match number:
        case signal.SIGKILL:
            return f"killed ({name}), perhaps for want of memory"
        case signal.SIGBUS:
            return f"a file that it reads was cut short, or its disk failed ({name})"
        case signal.SIGSEGV | signal.SIGABRT | signal.SIGILL | signal.SIGFPE:
            return f"a library in it crashed ({name})"
    return f"it was ended by {name}"


class Connection:
    """One running process with an engine behind its streams. Sending never blocks."""

    def __init__(self, command: EngineCommand, process: subprocess.Popen[bytes]) -> None:
        from dtype_engine.worker.frames import FrameReader

        assert process.stdout is not None
        self._command = command
        self._process = process
        output = process.stdout
        self.reader: FrameReader = FrameReader(lambda count: output.read(count) or b"")
        self._stderr = b""
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"dtype-engine-{name}", daemon=True)
            for name, work in (("in", self._write), ("log", self._read_stderr))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def process_id(self) -> int:
        """The number of the process."""
        return self._process.pid

    def handshake(self) -> control.Hello:
        """Wait for the engine's first message. Raises UserError where what answers is no engine of this version."""
        from dtype_engine.core.version import __version__
        from dtype_engine.worker import control, messages
        from dtype_engine.worker.frames import WireError

        name = self._command.name
        try:
            found = self.reader.find_mark(self._command.compressed)
            data = self.reader.next() if found else None
            if data is None:
                said = self.last_words()
                raise NoAnswer(f"{name}: {said}", self._process.poll(), said)
            hello = messages.AnswerDecoder().decode(data)
            if not isinstance(hello, control.Hello):
                raise WireError("it does not say hello")
            if hello.protocol != control.PROTOCOL:
                raise UserError(
                    f"{name} has dtype-tui {printable(hello.version, 40)}, and this is {__version__}: they can't work together; "
                    "install the same version on both"
                )
            if hello.missing:
                raise UserError(
                    f"{name}: {' and '.join(hello.missing)} can't be imported there; install dtype-tui there as a whole"
                )
        except WireError as error:
            self.end(0.0)
            raise UserError(
                f"{name}: what answers is no dtype-engine of version {__version__}: {one_line(error, 200)}"
            ) from None
        except UserError:
            self.end(0.0)
            raise
        return hello

    def open_model(self, request: control.Open) -> str:
        """Tell an engine that has none yet which model to open; its title. Raises UserError where the model, or a rule, means
        nothing there.
        """
        from dtype_engine.worker import control, messages
        from dtype_engine.worker.frames import WireError

        self.send(request)
        try:
            data = self.reader.next()
            answer = messages.AnswerDecoder().decode(data) if data is not None else None
            if not isinstance(answer, control.Opened):
                raise UserError(f"{self._command.name}: it says nothing of the model: {self.last_words()}")
        except (UserError, WireError) as error:
            self.end(0.0)
            raise UserError(str(error)) from None
        if answer.refusal:
            self.end(1.0)
            raise UserError(answer.refusal if self._command.is_local else f"{self._command.name}: {answer.refusal}")
        return answer.title

    def send(self, request: Message) -> None:
        """Send a request, soon."""
        from dtype_engine.worker.messages import encode_request

        data = encode_request(request)
        self._outgoing.put(len(data).to_bytes(4, "big") + data)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def end(self, seconds: float) -> int:
        """Close the engine's input, wait so long for its end, then end it; the exit status, negative for a signal's number."""
        self._outgoing.put(None)
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        for thread in self._threads:
            thread.join(0.5)
        return status

    def last_words(self) -> str:
        """How it ended, if it has, and the last line that it wrote to standard error."""
        try:
            status: int | None = self._process.wait(1.0)  # its output ends a moment before it does
        except subprocess.TimeoutExpired:
            status = None
        ended = f"it ended with status {status}" if status is not None else "it does not answer"
        return f"{ended}: {line}" if (line := self.last_line()) else ended

    def last_line(self) -> str:
        """The last line that it wrote to standard error; empty where there is none."""
        self._threads[1].join(0.5)
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        return printable(lines[-1], 200) if lines else ""

    def _write(self) -> None:
        assert self._process.stdin is not None
        with self._process.stdin as stream:
            while (data := self._outgoing.get()) is not None:
                try:
                    stream.write(data)
                except OSError:  # the reader sees the end, too
                    return

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := self._process.stderr.read(1 << 12):
            self._stderr = (self._stderr + data)[-_KEPT_OF_STDERR:]
