"""Detects that a file has changed since it was opened: weights are mapped into memory, and read long after the headers of their
files. Without this, a later read could mix the contents of two files, or fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.regular_files import reading
from dtype_engine.core.text import printable
from dtype_engine.core.throttle import Throttle


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The state of a file when it was opened, to detect later changes."""

    path: Path
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """The time of the last change of the content or of the permissions, names and times. No program can set it back."""

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Return the state of the file at `path`, after following links. Raises UserError if there is no such file."""
        with reading(printable(str(path), 500)):
            status = os.stat(path)
        return cls(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def state(self) -> tuple[int, int, int, int, int]:
        """What the system says of the file, without its path, in the order of the fields."""
        return self.device, self.inode, self.size, self.mtime_ns, self.ctime_ns

    def change(self) -> str | None:
        """Return how the file has changed since it was opened, such as `was written to`, or None."""
        try:
            now = os.stat(self.path)
        except OSError:
            return "is not there any more"
        if now.st_size < self.size:
            return f"was cut short: it had {self.size} bytes and has {now.st_size}"
        if (now.st_dev, now.st_ino) != (self.device, self.inode):
            return "was replaced by another file"
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            return "was written to"
        if now.st_ctime_ns != self.ctime_ns:
            return "was written to and its time set back, or its name or permissions were changed,"
        return None


def refuse_changed(files: Iterable[FileIdentity]) -> None:
    """Raise UserError, which names the first file that has changed since it was opened."""
    for file in files:
        if (change := file.change()) is not None:
            raise UserError(
                f"{printable(str(file.path), 500)} {change} after it was opened, so what is read of it now can't be trusted; "
                "open the model again"
            )


@contextmanager
def unchanged(files: tuple[FileIdentity, ...]) -> Iterator[None]:
    """A context manager that raises UserError if one of `files` has changed when the block begins or ends. If the block raised
    another error than Cancelled, the UserError replaces it.
    """
    refuse_changed(files)
    try:
        yield
    except Cancelled:
        raise
    except Exception:  # whatever failed may have failed because of it
        refuse_changed(files)
        raise
    refuse_changed(files)


class Watch:
    """Checks that files do not change while they are read. `look` can be called often: it checks the files at most ten times a
    second.
    """

    def __init__(self, files: Iterable[FileIdentity]) -> None:
        self._files = tuple(files)
        self._throttle = Throttle()

    def look(self) -> None:
        """Raise UserError if a file has changed since it was opened."""
        if self._throttle.due():
            refuse_changed(self._files)
