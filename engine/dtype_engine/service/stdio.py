"""The engine's end of a connection: a worker that an app controls through standard input and output.

The app starts it as `python -m dtype_engine.service.stdio`, or through ssh and in containers as `dtype-engine stdio`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtype_engine.service import control, events, imports
from dtype_engine.service.save_requests import SaveRequest

NICENESS = 10

if TYPE_CHECKING:
    from dtype_engine.service.frames import FrameReader, FrameWriter
    from dtype_engine.service.messages import Request
    from dtype_engine.service.worker import Worker


class EngineServer:
    """Runs a worker for the app at the other end, one connection at a time. keep: whether the app may reconnect, so that events
    are kept until it acknowledges them.
    """

    def __init__(self, keep: bool = False) -> None:
        from dtype_engine.service.outbox import Outbox

        self._outbox = Outbox(keep)
        self._requests = 0
        """How many requests have arrived since `Open`."""
        self._worker: Worker | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the engine opens a model or runs a command other than a paused scan."""
        return self._worker is not None and self._worker.is_busy

    def serve(self, reader: FrameReader, writer: FrameWriter) -> bool:
        """Talk to one app until the connection ends. Returns True if the app has closed it, and False if it was cut."""
        from dtype_engine.core.version import __version__
        from dtype_engine.service import messages
        from dtype_engine.service.frames import WireError

        missing = tuple(name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None)
        sending: threading.Thread | None = None
        try:
            writer.mark()
            hello = control.Hello(control.PROTOCOL, __version__, missing, self._requests, self._worker is not None)
            self._send(writer, hello)
            while (data := reader.next()) is not None:
                request = messages.decode_request(data)
                if isinstance(request, control.Close):
                    return True
                if isinstance(request, control.Open | control.Resume):
                    if isinstance(request, control.Open):
                        if self._worker is not None:
                            raise WireError("a model is open already")
                        if not self._open(request, writer):
                            return True
                        self._outbox.open()
                    else:
                        self._outbox.open(request.received)
                    sending = threading.Thread(
                        target=self._send_events, args=(writer,), name="dtype-engine-out", daemon=True
                    )
                    sending.start()
                elif self._worker is not None:
                    self._take(self._worker, request)
        except (OSError, WireError) as error:
            print(f"dtype-engine: the connection ended: {error}", file=sys.stderr)
        finally:
            self._outbox.shut()
            if sending is not None:
                sending.join(1.0)  # the thread may be stuck in a write that is never read
        return False

    def close(self) -> None:
        """Stop the worker, and remove the unfinished files that it was writing."""
        if self._worker is not None:
            self._worker.close()

    def _open(self, request: control.Open, writer: FrameWriter) -> bool:
        """Start the worker, and return whether it was started. Sends the model's title, or why the model can't be opened."""
        from dtype_engine.checkpoint.source import locate_by
        from dtype_engine.core.errors import UserError
        from dtype_engine.core.input_args import check_files
        from dtype_engine.service.opening import refuse_unmatched
        from dtype_engine.service.worker import Worker

        try:
            source = locate_by(request.model, request.options)
            source.refuse_other_options(request.options)
            check_files(request.options)
            refuse_unmatched(source, request.options, request.recipe)
        except UserError as error:
            self._send(writer, control.Opened("", str(error)))
            return False
        self._send(writer, control.Opened(source.title))
        self._worker = Worker(source, request.options, self._emit, request.read_headers)
        self._worker.start()
        return True

    def _emit(self, event: events.Event) -> None:
        if not gc.isenabled() and events.is_opened(event):
            gc.freeze()
            gc.enable()
        self._outbox.put(event)

    def _take(self, worker: Worker, request: Request) -> None:
        match request:
            case control.Acknowledge():
                self._outbox.acknowledge(request.received)
                return
            case control.PlanExport():
                worker.plan_export()
            case control.CheckPath():
                worker.check_path(request.path, request.for_export)
            case _ if isinstance(request, SaveRequest):
                worker.save(request)
            case _:
                worker.request(request)  # type: ignore[arg-type]
        self._requests += 1

    def _send(self, writer: FrameWriter, answer: object) -> None:
        from dtype_engine.service.messages import encode_answer

        for message in encode_answer(answer):  # type: ignore[arg-type]
            writer.put(message)

    def _send_events(self, writer: FrameWriter) -> None:
        with contextlib.suppress(OSError):  # the thread that reads notices that the connection has ended
            while (event := self._outbox.take()) is not None:
                self._send(writer, event)


def own_streams() -> tuple[Callable[[int], bytes], Callable[[bytes], object]]:
    """Reserve standard input and output for messages, and return (a function that reads from standard input, a function that writes
    to standard output). From now on, a model's code reads an empty standard input, and its output goes to standard error.
    """
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return lambda count: os.read(incoming, count), lambda data: write_all(outgoing, data)


def write_all(file: int, data: bytes) -> None:
    """Write all of `data` to a file descriptor. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def main(compressed: bool = False) -> None:
    """Run an engine for one app. The process exits when the connection ends. compressed: whether to compress events."""
    os.nice(max(0, NICENESS - os.nice(0)))  # the app's screen has priority
    gc.disable()  # until the model is open, because what is imported and loaded is long-lived
    imports.begin_imports()
    from dtype_engine.checkpoint import crash_watch
    from dtype_engine.service.frames import FrameReader, FrameWriter

    read, write = own_streams()
    crash_watch.start()
    server = EngineServer()
    reader, writer = FrameReader(read), FrameWriter(write, compressed)
    try:
        server.serve(reader, writer)
        server.close()
    finally:
        os._exit(0)  # a normal exit would wait for an import or a kernel that still runs


if __name__ == "__main__":
    main("--compressed" in sys.argv[1:])
