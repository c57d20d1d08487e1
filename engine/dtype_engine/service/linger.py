"""An engine that keeps running when its connection is cut. It listens on a socket that only its user can reach. A relay process
copies bytes between this socket and its own standard input and output.

Only the user may enter the folder of the sockets. A running engine holds a lock on its log file, so a relay can tell without
connecting whether it still runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from dtype_engine.core.errors import UserError
from dtype_engine.core.user_folders import state_folder
from dtype_engine.service import imports
from dtype_engine.service.connection import ENGINE_ENDED, last_line, signal_words
from dtype_engine.service.stdio import EngineServer, write_all

_CHUNK = 1 << 16
_END_WAIT_S = 3.0
_POLL_S = 0.1


def relay(session: str, linger_s: float, compressed: bool) -> int:
    """Connect standard input and output to the engine with the token `session`, and start it if it is not running. Returns the exit
    status. linger_s: how many seconds a new engine waits for a connection. compressed: whether a new engine compresses its events.
    Raises UserError if other users may enter the sockets' folder.
    """
    started_in = os.getcwd()
    folder = state_folder() / "engines"
    _enter(folder)  # relative names are short, and the path of a socket may have only about a hundred characters
    try:
        connection, child = _reach(session, started_in, linger_s, compressed)
    except OSError as error:
        raise UserError(f"can't make a socket in {folder}: {error.strerror or error}") from None
    threading.Thread(target=_copy_input, args=(connection,), name="dtype-relay-in", daemon=True).start()
    with contextlib.suppress(OSError):  # one of the two ends is gone
        while data := connection.recv(_CHUNK):
            write_all(1, data)
    connection.close()
    until = time.monotonic() + _END_WAIT_S
    while _is_running(session):
        if time.monotonic() > until:
            return 0  # a newer connection has replaced this one
        time.sleep(0.05)
    print(_last_words(session, child), file=sys.stderr)
    with _folder_locked():
        if not _is_running(session):
            _remove(session)  # an engine that was killed could not do so itself
    return ENGINE_ENDED


def _enter(folder: Path) -> None:
    """Make a folder the working directory, creating it if needed. Raises UserError if other users may enter it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise UserError(f"can't use {folder} for sockets: {error.strerror}") from None
    try:
        about = os.fstat(number)
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise UserError(f"{folder} is open to others: no engine listens there (chmod 700 closes it)")
        os.fchdir(number)
    finally:
        os.close(number)


def _reach(
    session: str, started_in: str, linger_s: float, compressed: bool
) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Connect to an engine, starting it if needed. Returns (connection, the engine's process if this call started it or None).
    started_in: the working directory of a new engine. Other arguments: as in `relay`.
    """
    name = f"{session}.socket"
    with _folder_locked():
        child = None
        if not _is_running(session):
            _remove(session)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(name)
                listener.listen(4)
                child = _start(listener, session, started_in, linger_s, compressed)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(name)
    return connection, child


@contextlib.contextmanager
def _folder_locked() -> Iterator[None]:
    """A context manager that locks the working directory, so that two relays don't start the same engine."""
    lock = os.open(".", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove(path: str) -> None:
    """Remove the files of an engine that has ended. path: their path without extension."""
    for ending in ("socket", "log"):
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.{ending}")


def _start(
    listener: socket.socket, session: str, started_in: str, linger_s: float, compressed: bool
) -> subprocess.Popen[bytes]:
    """Start an engine that survives a hang-up. It inherits the socket `listener` and a locked log file. Other arguments: as in
    `_reach`.
    """
    log = os.open(f"{session}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        module = ("-P", "-m", "dtype_engine.service.linger")
        end = (str(listener.fileno()), str(Path.cwd() / session), str(linger_s), *(["--compressed"] * compressed))
        return subprocess.Popen(
            (sys.executable, *module, *end),
            cwd=started_in,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )
    finally:
        os.close(log)


def _is_running(session: str) -> bool:
    """Return whether an engine is running. A running engine holds the lock on its log file."""
    try:
        log = os.open(f"{session}.log", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(log)
    return False


def _last_words(session: str, child: subprocess.Popen[bytes] | None) -> str:
    """Return the probable reason why an engine has ended. child: its process, if this relay started it."""
    if child is not None and (status := child.wait()) < 0:
        return signal_words(-status)
    with contextlib.suppress(OSError):
        if line := last_line(Path(f"{session}.log").read_bytes()[-4096:]):
            return line
    return "it no longer runs"


def _copy_input(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, _CHUNK):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


def serve(listener: socket.socket, linger_s: float, compressed: bool) -> None:
    """Run an engine for the apps that connect to the socket `listener`. Returns when the app closes the engine, or when the engine
    has been idle and without a connection for `linger_s` seconds. compressed: whether to compress events.

    A new connection replaces the current one, because a connection that is cut may look intact for hours.
    """
    from dtype_engine.service.frames import FrameReader, FrameWriter

    server, closed = EngineServer(keep=True), threading.Event()

    def talk(connection: socket.socket) -> None:
        with connection:
            if server.serve(FrameReader(connection.recv), FrameWriter(connection.sendall, compressed)):
                closed.set()

    listener.settimeout(_POLL_S)
    current: socket.socket | None = None
    talking = threading.Thread()
    needed_at = time.monotonic()
    while not closed.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if server.is_busy or talking.is_alive():
                needed_at = time.monotonic()
            elif time.monotonic() - needed_at > linger_s:
                break
            continue
        if current is not None and talking.is_alive():
            with contextlib.suppress(OSError):  # it is ending by itself
                current.shutdown(socket.SHUT_RDWR)
            talking.join()
        current = connection
        talking = threading.Thread(target=talk, args=(connection,), name="dtype-engine-talk", daemon=True)
        talking.start()
    server.close()


def main() -> None:
    """Run a lingering engine. Its arguments are those that `_start` gives."""
    number, path, linger_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    gc.disable()  # until the model is open, because what is imported and loaded is long-lived
    imports.begin_imports()
    try:
        with socket.socket(fileno=number) as listener:
            serve(listener, linger_s, "--compressed" in sys.argv[4:])
        os.unlink(f"{path}.log")
    except BaseException:
        traceback.print_exc()  # to the log, whose last line the next relay prints
    finally:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.socket")
        os._exit(0)  # a normal exit would wait for an import or a kernel that still runs


if __name__ == "__main__":
    main()
