"""Locks of unfinished exports: they tell what a killed process left behind from what a living one still writes.

An export to `out` is written to a folder beside it, `.out.partial-HOST.*`. What it replaces waits in another,
`.out.replaced-HOST.*`, until its successor is in place. The writer keeps both locked. A lock ends with its process, whatever
ends that, and is not fooled by numbers of processes that are given again. The name has the machine, since a lock may not reach
over a network.
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
"""What the folder that is to be replaced is called where it waits."""
_UNLOCKED_S = 60.0
"""For longer than this no living process leaves a new folder empty and unlocked."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an empty folder while the block runs, which may fill and rename it."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def sibling(target: Path, purpose: str) -> Path:
    """A folder that is to be made beside an export's target: whoever makes it knows its name before it is there, and so what to
    remove whenever a signal comes.
    """
    return target.parent / f"{_prefix(target, purpose)}{secrets.token_hex(8)}"


def _prefix(target: Path, purpose: str) -> str:
    return f".{target.name[:100]}.{purpose}-{socket.gethostname()[:64]}."


def recover_stale(target: Path) -> None:
    """Clear up after exports to `target` on this machine whose processes are gone: what they had begun is removed, and what
    they were about to replace has its name again if nothing else took it.
    """
    ours = re.compile(
        "|".join(f"{re.escape(_prefix(target, purpose))}[0-9a-f]{{16}}" for purpose in (PARTIAL, REPLACED))
    )
    with contextlib.suppress(OSError):
        for folder in [entry for entry in target.parent.iterdir() if ours.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                _clear_up(folder, target)


def _clear_up(folder: Path, target: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the writer lives
        if not os.listdir(folder) and time.time() - folder.stat().st_mtime < _UNLOCKED_S:
            return  # its writer may be about to lock it
        if (folder / OLD).is_dir() and not os.path.lexists(target):
            os.rename(folder / OLD, target)
        shutil.rmtree(folder)
    finally:
        os.close(number)
