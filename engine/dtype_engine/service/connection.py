"""Starts an engine in another process, and connects to it through that process's standard input and output."""

from __future__ import annotations

import contextlib
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
    from dtype_engine.service import control
    from dtype_engine.service.frames import FrameReader
    from dtype_engine.service.message import Message

COMMAND = (sys.executable, "-P", "-m", "dtype_engine.service.stdio")
"""The command that starts an engine on this machine. With `-P`, no file in the working directory can replace a library."""


THIS_MACHINE = "the engine"
"""The name, in messages to the user, of an engine that runs on this machine."""
SESSION = "{session}"
"""A placeholder in an engine's command for a token that identifies it, so that the same command can later reconnect to it."""
_KEPT_OF_STDERR = 4096
MOST_UNSENT = 4096
"""Maximum number of requests that wait to be sent. If there are more, the engine has stopped reading, and is killed."""
ENGINE_ENDED = 70
"""The exit status of a relay (`dtype-engine stdio`) whose engine, a process of its own, has ended."""


class NoAnswer(UserError):
    """Raised if the started process ends without a message. status: its exit status, or None if unknown. words: how it ended, with
    the last line that it wrote.
    """

    def __init__(self, message: str, status: int | None, words: str) -> None:
        super().__init__(message)
        self.status = status
        self.words = words


@dataclass(frozen=True)
class EngineCommand:
    """The command that starts an engine, or reconnects to one, with facts about the engine."""

    arguments: Sequence[str] = COMMAND
    """The words of the command. If one of them contains SESSION, the engine outlives its connection."""
    name: str = THIS_MACHINE
    """The engine's name in messages to the user, such as "me@gpu1"."""
    compressed: bool = False
    """Whether the engine compresses its events."""
    unattended: Sequence[str] = ()
    """The command for reconnecting while the app's screen is open and ssh can't ask for a password. If empty, `arguments` is
    used.
    """

    @property
    def is_local(self) -> bool:
        """Whether the engine writes to the same file system as this process."""
        return self.name == THIS_MACHINE

    @property
    def lingers(self) -> bool:
        """Whether the engine keeps running when its connection is cut."""
        return any(SESSION in argument for argument in self.arguments)

    def start(self, session: str = "", attended: bool = False) -> subprocess.Popen[bytes]:
        """Run the command, and return the process. session: the token that replaces `SESSION` in the arguments. attended: whether
        somebody can enter a password. Raises UserError.
        """
        arguments = self.arguments if attended or not self.unattended else self.unattended
        try:
            return start_process([word.replace(SESSION, session) for word in arguments], own_group=not attended)
        except OSError as error:
            raise UserError(f"{printable(shlex.join(arguments), 200)}: {error.strerror}") from None


def new_session() -> str:
    """Return a new random token that identifies one engine."""
    return os.urandom(10).hex()


def start_process(arguments: Sequence[str], own_group: bool = True) -> subprocess.Popen[bytes]:
    """Start a process with pipes. own_group: whether to protect the process from signals such as Ctrl+C. Raises OSError."""
    return subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        process_group=0 if own_group else None,
    )


def last_line(output: bytes) -> str:
    """Return the last line of a process's output, or ""."""
    lines = output.decode(errors="replace").strip().splitlines()
    return printable(lines[-1], 800) if lines else ""  # a path of 500 letters, and what happened to it


def signal_words(number: int) -> str:
    """Return words for an error message: the probable reason why an engine was ended by the signal with this number."""
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
    """A running process that is an engine or relays to one. Sending never blocks."""

    def __init__(self, command: EngineCommand, process: subprocess.Popen[bytes]) -> None:
        from dtype_engine.service.frames import FrameReader

        assert process.stdout is not None
        self._command = command
        self._process = process
        output = process.stdout
        self.reader: FrameReader = FrameReader(lambda count: output.read(count) or b"")
        self._stderr = b""
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(MOST_UNSENT)
        self.is_full = False
        """Whether the engine was killed because it let too many requests pile up."""
        self._threads = [
            threading.Thread(target=work, name=f"dtype-engine-{name}", daemon=True)
            for name, work in (("in", self._write), ("log", self._read_stderr))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def process_id(self) -> int:
        """The ID of the started process, which may be an ssh client."""
        return self._process.pid

    def handshake(self) -> control.Hello:
        """Return the engine's first message. Raises UserError if the process is not an engine of this version."""
        from dtype_engine.core.version import __version__
        from dtype_engine.service import control, messages
        from dtype_engine.service.frames import WireError

        name = self._command.name
        try:
            found = self.reader.find_mark(self._command.compressed)
            data = self.reader.next() if found else None
            if data is None:
                words = self.last_words()
                raise NoAnswer(f"{name}: {words}", self._process.poll(), words)
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
        except (WireError, UserError) as error:
            self.end(0.0)
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{name}: what answers is no dtype-engine of version {__version__}: {one_line(error, 200)}"
            ) from None
        return hello

    def open_model(self, request: control.Open) -> str:
        """Let a new engine open a model, and return the model's title. Raises UserError with the engine's refusal."""
        from dtype_engine.service import control, messages
        from dtype_engine.service.frames import WireError

        self.send(request)
        try:
            data = self.reader.next()
            answer = messages.AnswerDecoder().decode(data) if data is not None else None
            if not isinstance(answer, control.Opened):
                raise UserError(f"{self._command.name}: it did not open the model: {self.last_words()}")
        except (UserError, WireError) as error:
            self.end(0.0)
            raise UserError(str(error)) from None
        if answer.refusal:
            self.end(1.0)
            raise UserError(answer.refusal if self._command.is_local else f"{self._command.name}: {answer.refusal}")
        return answer.title

    def send(self, request: Message) -> None:
        """Queue a request, which another thread sends. If too many requests wait already, the engine is killed."""
        from dtype_engine.service.messages import encode_request

        data = encode_request(request)
        try:
            self._outgoing.put_nowait(len(data).to_bytes(4, "big") + data)
        except queue.Full:
            self.is_full = True
            self.kill()

    def kill(self) -> None:
        self._process.kill()

    def end(self, seconds: float) -> int:
        """Close the engine's input, and kill the process after `seconds`. Returns its exit status, or -n for signal n."""
        with contextlib.suppress(queue.Full):
            self._outgoing.put_nowait(None)
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        for thread in self._threads:
            thread.join(0.5)
        return status

    def last_words(self) -> str:
        """Return words for an error message: whether and how the process has ended, and the last line of its standard error."""
        try:
            status: int | None = self._process.wait(1.0)  # its output ends a moment before the process does
        except subprocess.TimeoutExpired:
            status = None
        ended = f"it ended with status {status}" if status is not None else "it does not answer"
        return f"{ended}: {line}" if (line := self.last_line()) else ended

    def last_line(self) -> str:
        """Return the last line of the process's standard error, or ""."""
        self._threads[1].join(0.5)
        return last_line(self._stderr)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with self._process.stdin as stream:
            while (data := self._outgoing.get()) is not None:
                try:
                    stream.write(data)
                except OSError:  # the thread that reads notices that the process has ended
                    return

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := self._process.stderr.read(1 << 12):
            self._stderr = (self._stderr + data)[-_KEPT_OF_STDERR:]
