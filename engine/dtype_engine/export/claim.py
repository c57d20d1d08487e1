"""Who writes to an unfinished export: what a process that was killed left behind is told from what a living one writes.

The folder holds a file that its writer keeps locked. A lock ends with its process, whatever ends that, and is not fooled by
numbers of processes that are given again. The file names the machine, since a lock may not reach over a network.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is locked, and nothing is ever taken for stale
    fcntl = None  # type: ignore[assignment]

CLAIM = ".dtype-engine-export"
_WRITER = "dtype-engine"


@contextmanager
def claimed(stage: Path) -> Iterator[None]:
    """Hold the claim on a folder while the block runs; it is gone afterwards."""
    unlocked = stage / f"{CLAIM}.new"
    with open(unlocked, "w", encoding="utf-8") as file:
        json.dump({"writer": _WRITER, "host": socket.gethostname(), "process": os.getpid()}, file)
        file.flush()
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It gets its name with the lock on it: whoever sees the name and gets the lock knows that the writer is gone.
        os.rename(unlocked, stage / CLAIM)
        yield
        os.unlink(stage / CLAIM)


def remove_stale(target: Path) -> None:
    """Remove what exports to `target` left unfinished on this machine, where their processes are gone."""
    with contextlib.suppress(OSError):
        prefix = f".{target.name[:100]}.partial-"
        for folder in [entry for entry in target.parent.iterdir() if entry.name.startswith(prefix)]:
            if not folder.is_symlink() and folder.is_dir():
                with contextlib.suppress(OSError):
                    _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    if fcntl is None:
        return
    number = os.open(folder / CLAIM, os.O_RDWR | os.O_NOFOLLOW)
    with open(number, encoding="utf-8") as file:
        try:
            claim = json.load(file)
        except ValueError:
            return
        if not isinstance(claim, dict) or (claim.get("writer"), claim.get("host")) != (_WRITER, socket.gethostname()):
            return
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the writer lives
        shutil.rmtree(folder, ignore_errors=True)
