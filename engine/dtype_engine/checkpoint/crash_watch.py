"""Says in one line why this process ended by a signal that leaves no Python code which could say so: which file was cut short
while it was read (SIGBUS), or that a library aborted the process or crashed.

Weights are mapped from their files, and reading a page that the file no longer has is a signal in the thread that reads. A small
process, which is this file run as a script, waits at the other end of the pipe to which `faulthandler` writes in a crash. It checks
which of the files has changed, and prints one line.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the script imports the rest only after a crash, so that it starts in milliseconds
    import subprocess

    from dtype_engine.checkpoint.file_identity import FileIdentity

_BUS_ERROR = b"Fatal Python error: Bus error"
_ABORTED = b"Fatal Python error: Aborted"
_CRASHED = b"Fatal Python error: Segmentation fault"
_FILE = b"file "
_TRACEBACK = "DTYPE_TUI_TRACEBACK"
_watcher: tuple[subprocess.Popen[bytes], int] | None = None
"""The process that waits, and the end of the pipe to write to."""


def start() -> None:
    """Watch for a crash of this process from now on. If no process can be started, `faulthandler` writes to standard error."""
    global _watcher
    if _watcher is not None or faulthandler.is_enabled():
        return
    import subprocess

    reading, writing = os.pipe()
    try:
        # In a session of its own, no signal of the terminal ends it before this process.
        child = subprocess.Popen(
            [sys.executable, "-P", "-S", __file__], stdin=reading, stdout=subprocess.DEVNULL, start_new_session=True
        )
    except OSError:
        os.close(writing)
        faulthandler.enable(2)
        return
    finally:
        os.close(reading)
    _watcher = child, writing
    _tell(sys.path)
    faulthandler.enable(writing)


def watch(files: Iterable[FileIdentity]) -> None:
    """Name one of these files too, if it has changed when this process crashes. Does nothing unless `start` was called."""
    if _watcher is not None:
        for file in files:
            _tell([os.fspath(file.path), *file.state])


def _tell(entry: list[Any]) -> None:
    assert _watcher is not None
    line = memoryview(_FILE + json.dumps(entry).encode() + b"\n")
    try:
        while line:
            line = line[os.write(_watcher[1], line) :]
    except BrokenPipeError:
        pass  # somebody has ended the process that waits


def _report(told: bytes) -> None:
    """Print what ended the process that has written `told` to the pipe: its `sys.path`, its files and the report of the crash."""
    lines = told.splitlines(keepends=True)
    entries = [json.loads(line.removeprefix(_FILE)) for line in lines if line.startswith(_FILE)]
    crash = b"".join(line for line in lines if not line.startswith(_FILE))
    if not crash:
        return
    explained = crash.startswith((_BUS_ERROR, _ABORTED, _CRASHED))
    if not explained or os.environ.get(_TRACEBACK):
        sys.stderr.buffer.write(crash)
        sys.stderr.flush()
    if explained:
        sys.path[:] = entries[0]
        print(f"dtype-engine: {_sentence(entries[1:], crash)}", file=sys.stderr)


def _sentence(entries: list[Any], crash: bytes) -> str:
    """Return why the process ended. entries: its files. crash: the report of the crash."""
    from pathlib import Path

    from dtype_engine.checkpoint.file_identity import FileIdentity, refuse_changed
    from dtype_engine.core.errors import UserError

    try:
        refuse_changed(FileIdentity(Path(path), *state) for path, *state in entries)
    except UserError as error:
        return str(error)
    if crash.startswith(_CRASHED):
        return f"a library in the process crashed (SIGSEGV); {_TRACEBACK}=1 shows where"
    if crash.startswith(_ABORTED):
        return f"the process was aborted (SIGABRT), probably for want of memory; {_TRACEBACK}=1 shows where"
    return f"a file that is mapped into memory can't be read (SIGBUS): its disk failed; {_TRACEBACK}=1 shows where"


if __name__ == "__main__":
    _report(sys.stdin.buffer.read())
