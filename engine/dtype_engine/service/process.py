"""An engine in another process, on this machine or another one. Commands go to its standard input, events come from its standard
output.

If that process ends, the app continues and receives an event.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec

from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Recipe
from dtype_engine.service import control, events
from dtype_engine.service.commands import FollowRecipe, Request, SetInputs, SetRecipe, SetSettings
from dtype_engine.service.connection import (
    ENGINE_ENDED,
    MOST_UNSENT,
    Connection,
    EngineCommand,
    NoAnswer,
    new_session,
    signal_words,
)
from dtype_engine.service.engine import CLOSE_WAIT_S, Engine
from dtype_engine.service.message import Message

if TYPE_CHECKING:
    from dtype_engine.results.memory import MemoryStats
    from dtype_engine.service import messages
    from dtype_engine.service.save_requests import SaveRequest

_ACKNOWLEDGE_EVERY = 32
_MOST_UNHANDLED = 8
_MOST_UNHANDLED_BYTES = 1 << 20
"""After `_MOST_UNHANDLED` messages, or messages of this many bytes in all, reading from the engine pauses until the app has handled
them.
"""
_RECONNECT_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""The seconds to wait before each attempt to reconnect; the last number is used for all further attempts. The waits are long,
because each attempt may be a login that the server refuses.
"""


@dataclass
class _InForce:
    """The recipe, settings and inputs that the app requested last. After a restart, the new engine gets them."""

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
    """Remove the unfinished files of an export that an engine on this machine was writing when it ended. request: the request to
    export.
    """
    from dtype_engine.core.export_lock import recover_stale
    from dtype_engine.service.save_requests import ExportRequest

    if isinstance(request, ExportRequest):
        recover_stale(request.folder.expanduser().absolute())


class EngineProcess(Engine):
    """An engine in a process of its own, which this object starts and in which it opens a model. `emit` is called with the engine's
    events, from this object's threads.

    opening: names the model, and how it is opened. process: a process that was already started with `command`. connection: a
    connection to an engine that has already answered and has been asked to open the model. session: the token that identifies the
    engine when the app reconnects to it. wait: a function that returns when the app has handled all events that were emitted. The
    thread that reads from the engine calls it, and holds no lock meanwhile.
    """

    can_restart: ClassVar[bool] = True

    def __init__(
        self,
        command: EngineCommand,
        opening: control.Open,
        emit: Callable[[events.Event], None],
        process: subprocess.Popen[bytes] | None = None,
        connection: Connection | None = None,
        session: str = "",
        wait: Callable[[], object] = lambda: None,
    ) -> None:
        self._command = command
        self._opening = opening
        self._emit = emit
        self._wait = wait
        self._process = process
        self._connection = connection
        self._session = session or new_session()
        self._lock = threading.RLock()
        """Must be held to read or change the fields that are declared after it."""
        self._in_force = _InForce()
        self._requests: list[Message] = []
        """Requests to send after `Open`. They are kept until there is a connection; for a lingering engine also afterwards, because
        requests may be lost if the connection is cut.
        """
        self._is_connected = False
        """Whether the connection is intact and the engine was asked to open the model."""
        self._given_up = threading.Event()
        """Set to stop the attempts to reconnect."""
        self._received = 0
        """How many events this object has received from the current engine."""
        self._memory: MemoryStats | None = None
        self._pending: list[SaveRequest] = []
        """The save requests that the engine has not completed yet, in order. If an engine on this machine dies, their unfinished
        files are removed.
        """
        self._closing = False
        self._restarting = False
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def process_id(self) -> int | None:
        """The ID of the engine's process, or of the process that connects to it, or None if there is no process."""
        connection = self._connection
        return connection.process_id if connection is not None else None

    @property
    def host(self) -> str:
        return "" if self._command.is_local else self._command.name

    def start(self) -> None:
        with self._lock:
            self._thread = threading.Thread(target=self._run, name="dtype-engine", daemon=True)
            self._thread.start()

    def request(self, request: Request) -> None:
        with self._lock:
            self._in_force.note(request)
            self._send(request)

    def save(self, request: SaveRequest) -> None:
        from dtype_engine.service.save_requests import ConvertRequest, RecipeRequest

        if not self._command.is_local and isinstance(request, RecipeRequest | ConvertRequest):
            request = msgspec.structs.replace(request, as_text=True)
        with self._lock:
            if not self._ended:
                self._pending.append(request)
            self._send(request)

    def plan_export(self) -> None:
        with self._lock:
            self._send(control.PlanExport())

    def check_path(self, path: str, for_export: bool) -> None:
        with self._lock:
            self._send(control.CheckPath(path, for_export))

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        with self._lock:
            self._closing = True
            self._given_up.set()
            connection, thread = self._connection, self._thread
        if connection is not None:
            connection.send(control.Close())
            connection.end(wait_s)
        if thread is not None and thread is not threading.current_thread():
            thread.join(0.5)

    def restart(self) -> None:
        with self._lock:
            if self._ended:
                self._ended = False
                self._requests = [*self._in_force.requests()]
                self.start()
                return
            if self._thread is None:
                return
            self._restarting = True
            self._given_up.set()
            connection = self._connection
            if connection is not None and self._command.lingers:
                connection.send(control.Close())  # without this message it would outlive its connection
                threading.Timer(CLOSE_WAIT_S, connection.kill).start()
            elif connection is not None:
                connection.kill()

    def _send(self, request: Message) -> None:
        """Send a request if there is a connection. Also store it if it may have to be sent again later. The caller must hold the
        lock.
        """
        if self._ended:
            return  # the next engine gets the current recipe, settings and inputs
        if self._command.lingers or not self._is_connected:
            self._requests.append(request)
        if self._is_connected and self._connection is not None:
            self._connection.send(request)

    def _send_kept(self, connection: Connection, received: int) -> None:
        """Send the stored requests, except the first `received`, which the engine already has. From then on, new requests are sent
        at once.
        """
        with self._lock:
            for request in self._requests[received:]:
                connection.send(request)
            if not self._command.lingers:
                self._requests = []
            self._is_connected = True

    def _run(self) -> None:
        """The body of a thread: start an engine and emit its events until it ends. After a requested restart, start another one."""
        while True:
            reason = self._serve_once()
            with self._lock:
                self._connection, self._is_connected, self._process = None, False, None
                self._session, self._requests = new_session(), []
                pending, self._pending = self._pending, []
            if self._command.is_local:
                for request in pending:
                    clear_up(request)
            with self._lock:
                self._given_up.clear()
                if self._closing:
                    return
                if not self._restarting:
                    self._ended = True
                    self._emit(events.EngineEnded(reason))  # the lock lets this precede the next engine's events
                    return
                self._restarting = False
                self._requests = [*self._in_force.requests()]

    def _serve_once(self) -> str:
        """Start one engine process and pass the engine's events to the app, until the engine ends. If the connection to a lingering
        engine is cut, connect to this engine again. Returns why the engine ended.
        """
        from dtype_engine.service import messages

        self._received = 0
        try:
            connection = self._connected()
            decoder = messages.AnswerDecoder()
            self._send_kept(connection, 0)
            while (reason := self._follow(connection, decoder)) is None:
                decoder.begin_again()
                connection = self._reconnected(connection)
        except UserError as error:
            return str(error)
        return reason

    def _follow(self, connection: Connection, decoder: messages.AnswerDecoder) -> str | None:
        """Read the events that the engine sends over `connection`, and pass them to the app, until the connection ends. Returns why
        the engine has ended, or None if only the connection was cut.
        """
        from dtype_engine.service.frames import WireError

        name = self._command.name
        unhandled = unhandled_bytes = 0
        try:
            while (data := connection.reader.next()) is not None:
                if self._closing:
                    continue  # the app handles no more events, and decoding them would delay its exit
                self._take(decoder.decode(data), connection)
                unhandled, unhandled_bytes = unhandled + 1, unhandled_bytes + len(data)
                if unhandled >= _MOST_UNHANDLED or unhandled_bytes >= _MOST_UNHANDLED_BYTES:
                    self._wait()
                    unhandled = unhandled_bytes = 0
        except WireError as error:
            connection.kill()
            connection.end(0)
            return f"{name} sent what this version does not understand: {one_line(error, 200)}"
        status = connection.end(CLOSE_WAIT_S)
        if connection.is_full:
            return f"{name} was ended: it read none of the last {MOST_UNSENT:,} requests"
        if status == ENGINE_ENDED:
            return f"{name}: the engine there ended: {connection.last_line()}"
        with self._lock:
            if self._command.lingers and not self._given_up.is_set():
                self._is_connected = False
                return None
        return f"{name} ended: {self._why(status, connection)}"

    def _take(self, answer: messages.Answer | None, connection: Connection) -> None:
        """Process one decoded message of the engine: update the state of this object, and pass an event on to the app. answer: None
        for a part of a tree, which needs no processing. Raises WireError for an event that only this class may emit.
        """
        from dtype_engine.service.frames import WireError

        match answer:
            case None | control.Hello():
                return
            case control.Opened():
                if answer.refusal:
                    self._emit(events.OpenFailed(answer.refusal))
                return
            case events.EngineEnded() | events.EngineLost() | events.EngineBack():
                raise WireError(f"it sent {type(answer).__name__}")
            case events.Memory():
                self._memory = answer.stats
            case events.Saved():
                self._forget_saves(1)
                if not self._command.is_local:
                    answer = msgspec.structs.replace(answer, sentence=f"{self._command.name}: {answer.sentence}")
            case events.Refused(job="write"):
                self._forget_saves(1)
            case events.Stopped():
                self._forget_saves(answer.dropped.count("write"))
            case events.Composed():
                answer = self._written(answer)
        self._received += 1
        if self._command.lingers and self._received % _ACKNOWLEDGE_EVERY == 0:
            connection.send(control.Acknowledge(self._received))
        self._emit(answer)

    def _forget_saves(self, count: int) -> None:
        with self._lock:
            self._pending = self._pending[count:]

    def _written(self, composed: events.Composed) -> events.Saved:
        """Write the text in `composed`, which a remote engine sent, to the file on this machine that the app requested. Returns the
        event that reports the result to the app. Raises WireError if the app did not request such a file.
        """
        from dtype_engine.core.atomic_write import write_text_atomic
        from dtype_engine.service.frames import WireError
        from dtype_engine.service.save_requests import ConvertRequest, RecipeRequest

        with self._lock:
            request = self._pending.pop(0) if self._pending else None
        if not isinstance(request, RecipeRequest | ConvertRequest) or not request.as_text:
            raise WireError("a file that was not requested")
        try:
            path = write_text_atomic(request.file, composed.text, request.replace)
        except UserError as error:
            return events.Saved(composed.recipe, False, error.sentence)
        return events.Saved(composed.recipe, True, f"wrote {printable(str(path), 300)}, here", composed.notices)

    def _connected(self) -> Connection:
        with self._lock:
            if self._connection is not None:
                return self._connection
            process = self._process or self._command.start(self._session)
            self._connection = connection = Connection(self._command, process)
        connection.handshake()
        connection.send(self._opening)
        return connection

    def _reconnected(self, cut: Connection) -> Connection:
        """Reconnect to a running engine, however long it takes, and return the new connection. cut: the lost connection. Raises
        UserError if the engine has ended.
        """
        name = self._command.name
        words = f" ({line})" if (line := cut.last_line()) else ""
        self._emit(events.EngineLost(f"the connection to {name} is cut{words}"))
        for attempt in itertools.count():
            if self._given_up.wait(_RECONNECT_S[min(attempt, len(_RECONNECT_S) - 1)]):
                break
            with self._lock:
                if self._given_up.is_set():
                    break
                self._connection = connection = Connection(self._command, self._command.start(self._session))
            try:
                hello = connection.handshake()
            except NoAnswer as error:
                if error.status == ENGINE_ENDED:
                    raise UserError(f"{name}: the engine there ended: {connection.last_line()}") from None
                continue
            if not hello.is_open:
                connection.send(control.Close())
                connection.end(CLOSE_WAIT_S)
                raise UserError(f"{name}: the engine there is gone, with what it did since the connection was cut")
            connection.send(control.Resume(self._received))
            self._send_kept(connection, hello.requests)
            self._emit(events.EngineBack())
            return connection
        raise UserError(f"{name}: the connection is cut")

    def _why(self, status: int, connection: Connection) -> str:
        """Return the probable reason why the engine's process ended with the exit status `status`: its last words or, if a signal
        ended it (-n for signal n), a guess from the signal.
        """
        if status >= 0:
            return connection.last_words()
        return signal_words(-status) + (self._memory_words() if -status == signal.SIGKILL else "")

    def _memory_words(self) -> str:
        if self._memory is None or self._memory.rss_bytes is None:
            return ""
        return f"; it held {human_bytes(self._memory.rss_bytes)}"
