"""Locks on unfinished exports and downloads, which tell the remains of a killed process from what a running process is writing.

An export to `out` is written to a folder next to it, `.out.partial-HOST.*`. A folder that it replaces is moved to
`.out.replaced-HOST.*` until the new one is in place. The writer locks both folders. The system releases a lock when its process
ends; unlike a process ID, it is never reused. The names include the host, because locks may not work across a network.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL, REPLACED = "partial", "replaced"
OLD = "old"
"""The name of the replaced export inside its `.replaced` folder."""
_UNLOCKED_S = 60.0
"""Seconds after which an empty, unlocked folder or file counts as abandoned. A running process fills or locks its folder sooner."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context manager that locks an empty folder or file, which may be filled and renamed meanwhile."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def sibling(target: Path, purpose: str) -> Path:
    """Return an unused path, next to an export's target, for a folder that the caller creates. purpose: such as "partial"."""
    return target.parent / f"{_prefix(target, purpose)}{secrets.token_hex(8)}"


def _prefix(target: Path, purpose: str) -> str:
    return f".{target.name[:100]}.{purpose}-{socket.gethostname()[:64]}."


def recover_stale(target: Path) -> None:
    """Remove the unfinished folders of exports to `target` on this machine whose processes have ended. A folder that was being
    replaced is moved back if `target` is free.
    """
    ours = re.compile(
        "|".join(f"{re.escape(_prefix(target, purpose))}[0-9a-f]{{16}}" for purpose in (PARTIAL, REPLACED))
    )
    with contextlib.suppress(OSError):
        for folder in [entry for entry in target.parent.iterdir() if ours.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                _clear_up(folder, target)


def remove_stale_files(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the files in a folder and its subfolders that are named so and whose processes have ended."""
    for place, _, files in os.walk(folder):
        for file in filter(names.fullmatch, files):
            with contextlib.suppress(OSError):
                _remove_stale_file(Path(place, file))


def _remove_stale_file(file: Path) -> None:
    if file.is_symlink():  # a link can't be locked; it is renamed as soon as it is made
        if time.time() - file.lstat().st_mtime >= _UNLOCKED_S:
            file.unlink()
        return
    number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the writer lives
        status = os.fstat(number)
        if status.st_size or time.time() - status.st_mtime >= _UNLOCKED_S:
            file.unlink()
    finally:
        os.close(number)


def _clear_up(folder: Path, target: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the writer lives
        if not os.listdir(folder) and time.time() - folder.stat().st_mtime < _UNLOCKED_S:
            return  # its writer may not have locked it yet
        if (folder / OLD).is_dir() and not os.path.lexists(target):
            os.rename(folder / OLD, target)
        shutil.rmtree(folder)
    finally:
        os.close(number)
