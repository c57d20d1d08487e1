"""How an engine in another process is started, and one connection to it: its standard input and output."""

from __future__ import annotations

import queue
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.text import printable

if TYPE_CHECKING:
    from dtype_engine.worker import messages
    from dtype_engine.worker.frames import FrameReader

COMMAND = (sys.executable, "-P", "-m", "dtype_engine.worker.stdio")
"""The engine of this machine. `-P`: no file of the working directory stands in for a library."""


@dataclass(frozen=True)
class EngineCommand:
    """How to start an engine.

    name: what messages call it. compressed: its events come compressed. lingers: it outlives a connection, and answers the same
    command again.
    """

    arguments: Sequence[str] = COMMAND
    name: str = "the engine"
    compressed: bool = False
    lingers: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it is a child of this process."""
        return self.arguments is COMMAND

    def start(self) -> subprocess.Popen[bytes]:
        """Start it. Raises UserError."""
        try:
            return start_process(self.arguments, own_group=self.is_local)
        except OSError as error:
            raise UserError(f"{printable(shlex.join(self.arguments), 200)}: {error.strerror}") from None


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


class Connection:
    """One running process with an engine behind its streams. Sending never blocks."""

    def __init__(self, command: EngineCommand, process: subprocess.Popen[bytes]) -> None:
        from dtype_engine.worker.frames import FrameReader

        assert process.stdout is not None
        self._command = command
        self._process = process
        output = process.stdout
        self.reader: FrameReader = FrameReader(lambda count: output.read(count) or b"")
        self._stderr: deque[bytes] = deque(maxlen=20)
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

    def handshake(self) -> messages.Hello:
        """Wait for the engine's first message. Raises UserError where what answers is no engine of this version."""
        from dtype_engine.core.version import __version__
        from dtype_engine.worker import messages
        from dtype_engine.worker.frames import WireError

        name = self._command.name
        try:
            found = self.reader.find_mark(self._command.compressed)
            data = self.reader.next() if found else None
            if data is None:
                raise UserError(f"{name}: {self.last_words()}")
            hello = messages.AnswerDecoder(messages.RecipeNumbers()).decode(data)
            if not isinstance(hello, messages.Hello):
                raise WireError("it does not say hello")
        except WireError as error:
            raise UserError(
                f"{name}: what answers is no dtype-engine of version {__version__}: {one_line(error, 200)}"
            ) from None
        if hello.protocol != messages.PROTOCOL:
            raise UserError(
                f"{name} has dtype-tui {printable(hello.version, 40)}, and this is {__version__}: they can't work together; "
                "install the same version on both"
            )
        if hello.missing:
            raise UserError(
                f"{name}: {' and '.join(hello.missing)} can't be imported there; install dtype-tui there as a whole"
            )
        return hello

    def send(self, request: messages.Request) -> None:
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
        """The last line that it wrote to standard error, or that there is none; with its status where it has ended."""
        try:
            status: int | None = self._process.wait(1.0)  # its output ends a moment before it does
        except subprocess.TimeoutExpired:
            status = None
        self._threads[1].join(0.5)
        lines = b"".join(self._stderr).decode(errors="replace").strip().splitlines()
        ended = f"it ended with status {status}" if status is not None else "it does not answer"
        return f"{ended}: {printable(lines[-1], 200)}" if lines else ended

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
        for line in self._process.stderr:
            self._stderr.append(line[-500:])
