"""Locks of unfinished exports: they tell what a killed process left behind from what a living one still writes.

An export to `out` is written to a folder beside it, `.out.partial-*`. What it replaces waits in another, `.out.replaced-*`,
until its successor is in place. Each holds a file that its writer keeps locked. A lock ends with its process, whatever ends
that, and is not fooled by numbers of processes that are given again. The file names the machine, since a lock may not reach
over a network.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is locked, and nothing is ever taken for stale
    fcntl = None  # type: ignore[assignment]

CLAIM = ".dtype-engine-export"
PARTIAL, REPLACED = "partial", "replaced"
OLD = "old"
"""What the folder that is to be replaced is called where it waits."""
_NEW = f"{CLAIM}.new."
"""A claim that is not yet locked: its name has the process and the machine, since it may be empty when that process is killed."""
_UNCLAIMED_SECONDS = 60.0
"""For longer than this no living process leaves a new folder without its claim."""
_WRITER = "dtype-engine"


@contextmanager
def locked(stage: Path) -> Iterator[None]:
    """Hold the claim on a folder while the block runs. The file stays: `release` removes it from where the folder is then."""
    if fcntl is None:
        yield
        return
    unlocked = stage / f"{_NEW}{os.getpid()}.{socket.gethostname()}"
    with open(unlocked, "w", encoding="utf-8") as file:
        json.dump({"writer": _WRITER, "host": socket.gethostname(), "process": os.getpid()}, file)
        file.flush()
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed only after it is locked: a visible claim that can be locked has no live writer.
        os.rename(unlocked, stage / CLAIM)
        yield


def release(folder: Path) -> None:
    """Remove the claim from a folder that is finished, and so has its own name by now."""
    with contextlib.suppress(OSError):
        os.unlink(folder / CLAIM)


def sibling(target: Path, purpose: str) -> Path:
    """A folder that is to be made beside an export's target: whoever makes it knows its name before it is there, and so what to
    remove whenever a signal comes.
    """
    return target.parent / f"{_prefix(target, purpose)}{secrets.token_hex(8)}"


def _prefix(target: Path, purpose: str) -> str:
    return f".{target.name[:100]}.{purpose}-"


def remove(folder: Path) -> None:
    """Remove a claimed folder, its claim last: if this ends halfway too, somebody still knows whose the rest is."""
    with contextlib.suppress(OSError):
        for entry in [entry for entry in folder.iterdir() if entry.name != CLAIM]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def recover_stale(target: Path) -> None:
    """Clear up after exports to `target` on this machine whose processes are gone: what they had begun is removed, and what
    they were about to replace has its name again if nothing else took it.
    """
    with contextlib.suppress(OSError):
        prefixes = tuple(_prefix(target, purpose) for purpose in (PARTIAL, REPLACED))
        for folder in [entry for entry in target.parent.iterdir() if entry.name.startswith(prefixes)]:
            if not folder.is_symlink() and folder.is_dir():
                with contextlib.suppress(OSError):
                    _clear_up(folder, target)


def _clear_up(folder: Path, target: Path) -> None:
    if fcntl is None:
        return
    try:
        number = os.open(folder / CLAIM, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        _remove_unclaimed(folder)
        return
    with open(number, encoding="utf-8") as file:
        try:
            claim = json.load(file)
        except ValueError:
            return
        if not isinstance(claim, dict) or (claim.get("writer"), claim.get("host")) != (_WRITER, socket.gethostname()):
            return
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the writer lives
        if (folder / OLD).is_dir() and not os.path.lexists(target):
            os.rename(folder / OLD, target)
        remove(folder)


def _remove_unclaimed(folder: Path) -> None:
    """Remove a folder whose writer ended before it had the claim: nothing else is in it yet."""
    entries = list(folder.iterdir())
    if all(entry.name.startswith(_NEW) for entry in entries) and (
        (entries and all(_has_ended(entry.name) for entry in entries))
        or time.time() - folder.stat().st_mtime > _UNCLAIMED_SECONDS
    ):
        for entry in entries:
            entry.unlink(missing_ok=True)
        folder.rmdir()


def _has_ended(unlocked: str) -> bool:
    """Whether a claim that is not yet locked names a process of this machine that is gone."""
    process, _, host = unlocked.removeprefix(_NEW).partition(".")
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return False
