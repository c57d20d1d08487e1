"""Writes a file completely or not at all: writes a temporary file in the same folder, flushes it to disk, and renames it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from dtype_engine.core.errors import UserError, exhausted
from dtype_engine.core.hints import hint
from dtype_engine.core.text import printable
from dtype_engine.core.user_folders import expanded


def write_text_atomic(path: Path, text: str, replace: bool = False, mode: int | None = None) -> Path:
    """Write a text file in UTF-8 as `write_atomic` does."""
    try:
        content = text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"can't write {printable(str(path), 200)}: a name in it is not Unicode; rename the file or folder that has it"
        ) from None
    return write_atomic(path, content, replace, mode)


def write_atomic(path: Path, content: bytes | Iterable[bytes], replace: bool = False, mode: int | None = None) -> Path:
    """Write a file so that no crash, full disk or power failure leaves it incomplete. Returns its absolute path.

    content: all bytes, or pieces of them in their order. replace: whether an existing file may be replaced. mode: the file's
    permissions; None: the usual ones. Raises UserError if the file can't be written; an existing file is then unchanged.
    """
    path = check_target(path, replace)
    temporary: str | None = None
    try:
        number, temporary = tempfile.mkstemp(prefix=f".{path.name[:100]}.partial-", dir=path.parent)
        with open(number, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fchmod(number, mode if mode is not None else 0o666 & ~umask())
            os.fsync(number)
        if replace:
            os.replace(temporary, path)
        else:
            rename_new(temporary, path)
        temporary = None
        fsync_dir(path.parent)
    except FileExistsError:
        raise UserError(f"{path} exists; name another file{hint('replace')}") from None
    except OSError as error:
        raise UserError(f"can't write {printable(str(path), 200)}: {exhausted(error) or error.strerror}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return path


def check_target(path: Path, replace: bool = False) -> Path:
    """Return the absolute path of a file to write. Raises UserError if it is a folder, its parent folder is missing, or it may not
    be replaced.
    """
    path = expanded_target(path)
    try:
        if "\0" in str(path):
            raise ValueError("a name has no null character")
        folder, there, parent = path.is_dir(), path.exists() or path.is_symlink(), path.parent.is_dir()
        special = path.exists() and not folder and not path.is_file()
    except (OSError, ValueError) as error:  # too long, or it has a null byte
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"can't write {printable(str(path), 200)}: {reason}") from None
    if folder:
        raise UserError(f"{path} is a folder; name a file in it")
    if special and replace:
        raise UserError(f"{path} is a device or a pipe, which a file would replace; name another file")
    if not replace and there:
        raise UserError(f"{path} exists; name another file{hint('replace')}")
    if not parent:
        raise UserError(f"there is no folder {path.parent} to write {path.name} to")
    return path


def expanded_target(path: str | Path) -> Path:
    """Return the absolute path of a file or folder to write, with `~` replaced by a home folder. Raises UserError for the home of
    an unknown user, where a shell would write to a folder named `~name`.
    """
    whole = expanded(path)
    if str(whole).startswith("~"):
        raise UserError(f"can't write {printable(str(path), 200)}: there is no user of this name")
    return whole.absolute()


def is_taken(typed: str) -> bool:
    """Return whether there is a file or a non-empty folder at a typed path. Raises UserError if the system can't tell."""
    path = expanded_target(typed)
    try:
        return any(path.iterdir()) if path.is_dir() else path.exists() or path.is_symlink()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise UserError(f"can't write {printable(typed, 200)}: {getattr(error, 'strerror', None) or error}") from None


def rename_new(temporary: str, path: Path) -> None:
    """Rename a temporary file to `path`. If possible, a hard link is used, which raises FileExistsError if `path` exists."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def fsync_dir(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a new file name survives a power failure, if the system can."""
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
    """Return the process's umask, read from /proc, because `os.umask` would change it; 0o022 on a system without /proc."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except (OSError, ValueError):
        pass
    return 0o022
