"""An engine in another process, here or elsewhere. If it ends, the app continues and receives an event."""

from __future__ import annotations

import itertools
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import msgspec

from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes
from dtype_engine.core.user_folders import expanded
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
from dtype_engine.service.save_requests import ConvertRequest, ExportRequest, RecipeRequest, SaveRequest

if TYPE_CHECKING:
    from dtype_engine.results.memory import MemoryStats
    from dtype_engine.service import messages

_ACKNOWLEDGE_EVERY = 32
_MOST_UNHANDLED = 8
_MOST_UNHANDLED_BYTES = 1 << 20
"""After this many messages or bytes, reading from the engine pauses until the app has handled them."""
_IN_FORCE = (SetInputs, SetSettings, SetRecipe)
"""Requests that stay in force. After a restart, the new engine gets the last one of each type, in this order."""
_RECONNECT_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""The seconds to wait before each attempt to reconnect; the last number is used for all further attempts. The waits are long,
because each attempt may be a login that the server refuses.
"""


class EngineProcess(Engine):
    """An engine in a process of its own, which this object starts. `emit` is called from this object's threads.

    opening: the model, and the options to open it. process: a process that was already started with `command`, or None. connection:
    a connection to an engine that was already asked to open the model, or None. session: the token of the engine. wait: returns
    when the app has handled all events that were emitted; the thread that reads from the engine calls it without a lock.
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
        self._in_force: dict[type[Message], Message] = {}
        """The last request of each type in `_IN_FORCE`."""
        self._requests: list[Message] = []
        """Requests to send after `Open`. They are kept if the engine lingers, because a cut connection may lose them."""
        self._is_connected = False
        """Whether the connection is intact and the engine was asked to open the model."""
        self._given_up = threading.Event()
        """Set to stop the attempts to reconnect."""
        self._received = 0
        """How many events have come from the current engine."""
        self._memory: MemoryStats | None = None
        self._pending: list[SaveRequest] = []
        """The saves that the engine has not completed. If an engine on this machine dies, the remains of its exports are
        removed.
        """
        self._closing = False
        self._restarting = False
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def process_id(self) -> int | None:
        """The ID of the engine's process, or of the process that connects to it. None while there is no connection."""
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
            lasting = SetRecipe(request.recipe) if isinstance(request, FollowRecipe) else request
            if isinstance(lasting, _IN_FORCE):
                self._in_force[type(lasting)] = lasting
            self._send(request)

    def save(self, request: SaveRequest) -> None:
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
                self._requests = self._requests_in_force()
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

    def _requests_in_force(self) -> list[Message]:
        return [self._in_force[kind] for kind in _IN_FORCE if kind in self._in_force]

    def _send(self, request: Message) -> None:
        """Send a request, or store it until there is a connection. The caller must hold the lock."""
        if self._ended:
            return  # the next engine gets the current recipe, settings and inputs
        if self._command.lingers or not self._is_connected:
            self._requests.append(request)
        if self._is_connected and self._connection is not None:
            self._connection.send(request)

    def _send_kept(self, connection: Connection, received: int) -> None:
        """Send the stored requests except the first `received`, which the engine already has. Later requests are sent at once."""
        with self._lock:
            for request in self._requests[received:]:
                connection.send(request)
            if not self._command.lingers:
                self._requests = []
            self._is_connected = True

    def _run(self) -> None:
        """The body of a thread: run an engine until it ends and, after a requested restart, another one."""
        while True:
            reason = self._serve_once()
            from dtype_engine.core.export_lock import recover_stale

            with self._lock:
                self._connection, self._is_connected, self._process = None, False, None
                self._session, self._requests = new_session(), []
                pending, self._pending = self._pending, []
            for request in pending if self._command.is_local else ():
                if isinstance(request, ExportRequest):
                    recover_stale(expanded(request.folder).absolute())
            with self._lock:
                self._given_up.clear()
                if self._closing:
                    return
                if not self._restarting:
                    self._ended = True
                    self._emit(events.EngineEnded(reason))  # the lock lets this precede the next engine's events
                    return
                self._restarting = False
                self._requests = self._requests_in_force()

    def _serve_once(self) -> str:
        """Start one engine, and pass on its events until it ends. If only the connection ends, connect again. Returns why the
        engine ended.
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
        """Pass on events until the connection ends. Returns why the engine has ended, or None if only the connection was cut."""
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
        if status >= 0:
            return f"{name} ended: {connection.last_words()}"
        if -status == signal.SIGBUS and (line := connection.last_line()):
            return f"{name} ended: {line.removeprefix('dtype-engine: ')}"
        held = self._memory.rss_bytes if self._memory is not None and -status == signal.SIGKILL else None
        return f"{name} ended: {signal_words(-status)}" + (f"; it held {human_bytes(held)}" if held is not None else "")

    def _take(self, answer: messages.Answer | None, connection: Connection) -> None:
        """Process one decoded message, and pass it on if it is an event. Raises WireError for an event that only this class may
        emit, such as `EngineLost`.
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
        """Write the text of a remote engine to the file that the app requested. Raises WireError if it requested none."""
        from dtype_engine.core.atomic_write import write_text_atomic
        from dtype_engine.service.frames import WireError

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
        """Return a new connection to a running engine, trying until one succeeds. cut: the connection that was cut. Raises
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
