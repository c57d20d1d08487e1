"""An engine in another process, here or elsewhere: commands go to its standard input, events come from its standard output.

The app keeps drawing whatever becomes of that process: its end is an event.
"""

from __future__ import annotations

import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Recipe
from dtype_engine.worker import events
from dtype_engine.worker.commands import FollowRecipe, Request, SetInputs, SetRecipe, SetSettings
from dtype_engine.worker.engine import Engine

if TYPE_CHECKING:
    from dtype_engine.results.memory import MemoryStats
    from dtype_engine.worker import messages
    from dtype_engine.worker.frames import FrameReader
    from dtype_engine.worker.save_requests import SaveRequest

COMMAND = (sys.executable, "-P", "-m", "dtype_engine.worker.stdio")
"""The engine of this machine. `-P`: no file of the working directory stands in for a library."""
_CLOSE_WAIT_S = 2.5
_ACKNOWLEDGE_EVERY = 32
_RECONNECT_S = (0.5, 1.0, 2.0, 5.0)


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
        self._threads[1].join(0.5)
        lines = b"".join(self._stderr).decode(errors="replace").strip().splitlines()
        status = self._process.poll()
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


@dataclass
class _InForce:
    """What a new engine is told after it is opened, to be where the last one was."""

    recipe: Recipe = field(default_factory=Recipe)
    settings: RunSettings | None = None
    inputs: str | None = None

    def note(self, request: Request) -> None:
        match request:
            case SetRecipe() | FollowRecipe():
                self.recipe = request.recipe
            case SetSettings():
                self.settings = request.settings
            case SetInputs():
                self.inputs = request.line

    def requests(self) -> list[Request]:
        found: list[Request] = [SetInputs(self.inputs)] if self.inputs is not None else []
        found += [SetSettings(self.settings)] if self.settings is not None else []
        return [*found, SetRecipe(self.recipe)] if self.recipe.rules else found


def clear_up(request: SaveRequest) -> None:
    """Remove what an engine of this machine that has ended had begun to write."""
    from dtype_engine.core.export_lock import recover_stale
    from dtype_engine.worker.save_requests import ExportRequest

    if isinstance(request, ExportRequest):
        recover_stale(request.folder.expanduser().absolute())


class EngineProcess(Engine):
    """Starts the engine's process and opens `model` in it. `emit` is called from threads of this object.

    process: one that was started already, by the same command. connection: one that has answered (see `Connection.handshake`) and
    was told what to open.
    """

    can_restart: ClassVar[bool] = True

    def __init__(
        self,
        command: EngineCommand,
        model: str | None,
        options: Options,
        emit: Callable[[events.Event], None],
        read_headers: bool = False,
        process: subprocess.Popen[bytes] | None = None,
        connection: Connection | None = None,
    ) -> None:
        self._command = command
        self._model = model
        self._options = options
        self._emit = emit
        self._read_headers = read_headers
        self._process = process
        self._connection = connection
        self._lock = threading.RLock()
        """Guards what follows."""
        self._in_force = _InForce()
        self._unsent: list[messages.Request] = []
        """Requests made before the engine could be told."""
        self._recipes: messages.RecipeNumbers | None = None
        self._memory: MemoryStats | None = None
        self._pending: SaveRequest | None = None
        """What is being written."""
        self._closing = False
        self._restarting = False
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def process_id(self) -> int | None:
        """The number of the engine's process, or of what connects to it; None while there is none."""
        connection = self._connection
        return connection.process_id if connection is not None else None

    def start(self) -> None:
        with self._lock:
            self._thread = threading.Thread(target=self._run, name="dtype-engine", daemon=True)
            self._thread.start()

    def request(self, request: Request) -> None:
        with self._lock:
            self._in_force.note(request)
            self._send(request)

    def save(self, request: SaveRequest) -> None:
        from dtype_engine.worker.messages import SaveOf

        with self._lock:
            self._pending = request
            self._send(SaveOf(type(request).__name__, request))

    def plan_export(self) -> None:
        from dtype_engine.worker.messages import PlanExport

        with self._lock:
            self._send(PlanExport())

    def close(self) -> None:
        from dtype_engine.worker.messages import Close

        with self._lock:
            self._closing = True
            connection, thread = self._connection, self._thread
        if connection is not None:
            connection.send(Close())
            connection.end(_CLOSE_WAIT_S)
        if thread is not None and thread is not threading.current_thread():
            thread.join(0.5)

    def restart(self) -> None:
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                self._restarting = True
                if self._connection is not None:
                    self._connection.kill()
            else:
                self._ended = False
                self.start()

    def _send(self, request: messages.Request) -> None:
        """With the lock held."""
        if self._ended:
            return  # what is in force is told to the next one
        if self._recipes is None or self._connection is None:
            self._unsent.append(request)
            return
        self._recipes.note(request)
        self._connection.send(request)

    def _run(self) -> None:
        """Runs in a thread of its own: connect, open, hand on what the engine tells, until its end."""
        while True:
            reason = self._serve_once()
            with self._lock:
                self._connection, self._recipes, self._process = None, None, None
                self._unsent = list(self._in_force.requests())
                again, self._restarting = self._restarting, False
                self._ended = not again
                pending, self._pending = self._pending, None
                if self._closing:
                    return
            if pending is not None and self._command.is_local:
                clear_up(pending)
            if not again:
                self._emit(events.EngineEnded(reason))
                return

    def _serve_once(self) -> str:
        """One life of the engine; why it ended."""
        from dtype_engine.worker import messages
        from dtype_engine.worker.frames import WireError

        try:
            connection = self._connected()
        except UserError as error:
            return str(error)
        recipes = messages.RecipeNumbers()
        decoder = messages.AnswerDecoder(recipes)
        with self._lock:
            self._recipes = recipes
            unsent, self._unsent = self._unsent, []
            for request in unsent:
                self._send(request)
        received = 0
        try:
            while (data := connection.reader.next()) is not None:
                answer = decoder.decode(data)
                if isinstance(answer, messages.Opened):
                    if answer.refusal:
                        self._emit(events.OpenFailed(answer.refusal))
                elif answer is not None and not isinstance(answer, messages.Hello):
                    received += 1
                    if isinstance(answer, events.Memory):
                        self._memory = answer.reading
                    elif isinstance(answer, events.Saved):
                        self._pending = None
                    if received % _ACKNOWLEDGE_EVERY == 0:
                        connection.send(messages.Acknowledge(received))
                    self._emit(answer)
        except WireError as error:
            connection.kill()
            connection.end(0)
            return f"{self._command.name} sent what this version does not understand: {one_line(error, 200)}"
        status = connection.end(_CLOSE_WAIT_S)
        return f"{self._command.name} ended: {self._why(status, connection)}"

    def _connected(self) -> Connection:
        from dtype_engine.worker.messages import Open

        with self._lock:
            if self._connection is not None:
                return self._connection
            connection = Connection(self._command, self._process or self._command.start())
            self._connection = connection
        connection.handshake()
        connection.send(Open(self._model, self._options, self._read_headers))
        return connection

    def _why(self, status: int, connection: Connection) -> str:
        """Why a process with this exit status has ended, as far as that can be known."""
        if status >= 0:
            return connection.last_words()
        number = -status
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        match number:
            case signal.SIGKILL:
                return f"it was killed ({name}), as the system does to whatever takes the last memory{self._memory_words()}"
            case signal.SIGBUS:
                return f"a file that it reads was cut short, or its disk failed ({name})"
            case signal.SIGSEGV | signal.SIGABRT | signal.SIGILL | signal.SIGFPE:
                return f"a library crashed in it ({name})"
        return f"it was ended by {name}"

    def _memory_words(self) -> str:
        if self._memory is None or self._memory.rss_bytes is None:
            return ""
        return f"; it held {human_bytes(self._memory.rss_bytes)} when last seen"
