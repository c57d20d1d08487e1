"""Files that are there whole or not at all: written beside their name, brought to the disk, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from dtype_engine.core.errors import UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.text import printable


def write_text_atomic(path: Path, text: str, replace: bool = False, mode: int | None = None) -> Path:
    """Write a text file so that no crash, full disk or lost power leaves half of one; the absolute path.

    `replace`: a file of that name may be there and is replaced, else it is refused. `mode`: permissions, by default those
    of any new file. Raises UserError that says why it can't be written; whatever was there is still there then.
    """
    path = check_target(path, replace)
    beside: str | None = None
    try:
        number, beside = tempfile.mkstemp(prefix=f".{path.name[:100]}.partial-", dir=path.parent)
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(number, mode if mode is not None else 0o666 & ~umask())
            os.fsync(number)
        if replace:
            os.replace(beside, path)
        else:
            _rename_new(beside, path)
        beside = None
        fsync_dir(path.parent)
    except FileExistsError:
        raise UserError(f"{path} exists; name another file{hint('replace')}") from None
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror}") from None
    finally:
        if beside is not None:
            with contextlib.suppress(OSError):
                os.unlink(beside)
    return path


def check_target(path: Path, replace: bool = False) -> Path:
    """The absolute path of a file that may be written. Raises UserError where one is there, or no folder for it."""
    try:
        path = path.expanduser().absolute()
        folder, there, parent = path.is_dir(), path.exists() or path.is_symlink(), path.parent.is_dir()
    except (OSError, RuntimeError) as error:  # too long for a name, or in the home of nobody
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"can't write {printable(str(path), 200)}: {reason}") from None
    if folder:
        raise UserError(f"{path} is a folder; name a file in it")
    if not replace and there:
        raise UserError(f"{path} exists; name another file{hint('replace')}")
    if not parent:
        raise UserError(f"there is no folder {path.parent} to write {path.name} to")
    return path


def is_taken(typed: str) -> bool:
    """Whether a file is at the path that was typed, or a folder that is not empty. Raises UserError where that can't be told."""
    try:
        path = Path(typed).expanduser()
        return any(path.iterdir()) if path.is_dir() else path.exists() or path.is_symlink()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: the home of nobody; ValueError: a null character
        raise UserError(f"can't write {printable(typed, 200)}: {getattr(error, 'strerror', None) or error}") from None


def _rename_new(beside: str, path: Path) -> None:
    """Rename to a name that must be free; a link, unlike a rename, never takes the place of a file that came meanwhile."""
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.rename(beside, path)
    else:
        os.unlink(beside)


def fsync_dir(folder: Path) -> None:
    """Bring a folder's entries to the disk, so that a new name outlives a lost power; where the system can't, it can't."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)


def umask() -> int:
    """The process's umask, read without setting it where the system tells."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except (OSError, ValueError):
        pass
    return 0o022
