"""An engine in another process, here or elsewhere: commands go to its standard input, events come from its standard output.

The app keeps drawing whatever becomes of that process: its end is an event.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Recipe
from dtype_engine.worker import events
from dtype_engine.worker.commands import FollowRecipe, Request, SetInputs, SetRecipe, SetSettings
from dtype_engine.worker.connection import Connection, EngineCommand
from dtype_engine.worker.engine import Engine

if TYPE_CHECKING:
    from dtype_engine.results.memory import MemoryStats
    from dtype_engine.worker import messages
    from dtype_engine.worker.save_requests import SaveRequest

_CLOSE_WAIT_S = 2.5
_ACKNOWLEDGE_EVERY = 32
_RECONNECT_S = (0.5, 1.0, 2.0, 5.0)


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
        self._pending: list[SaveRequest] = []
        """What is being written, and what waits to be."""
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
            if not self._ended:
                self._pending.append(request)
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
            if self._ended:
                self._ended = False
                self._unsent = [*self._in_force.requests()]
                self.start()
            elif self._thread is not None:
                self._restarting = True
                if self._connection is not None:
                    self._connection.kill()

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
                pending, self._pending = self._pending, []
            if self._command.is_local:
                for request in pending:
                    clear_up(request)
            with self._lock:
                if self._closing:
                    return
                if not self._restarting:
                    self._ended = True
                    self._emit(events.EngineEnded(reason))  # with the lock held: before anything of the next one
                    return
                self._restarting = False
                self._unsent = [*self._in_force.requests()]

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
                        self._pending = self._pending[1:]
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
                return f"killed ({name}), perhaps for want of memory{self._memory_words()}"
            case signal.SIGBUS:
                return f"a file that it reads was cut short, or its disk failed ({name})"
            case signal.SIGSEGV | signal.SIGABRT | signal.SIGILL | signal.SIGFPE:
                return f"a library in it crashed ({name})"
        return f"it was ended by {name}"

    def _memory_words(self) -> str:
        if self._memory is None or self._memory.rss_bytes is None:
            return ""
        return f"; it held {human_bytes(self._memory.rss_bytes)}"
