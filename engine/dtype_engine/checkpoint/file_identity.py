"""Whether a file is still the one that was opened. Otherwise a later read would mix two files, or find none.

Weights are mapped, so they are read long after their headers. The device, inode, size and time of change that the system
reports show whether another program replaced, changed or truncated the file in between.
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
    """A file as the system described it when it was opened. `size` in bytes, `mtime_ns` in nanoseconds since 1970."""

    path: Path
    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """The file that `path` names now, after following links. Raises UserError where there is no such file."""
        with reading(printable(str(path), 500)):
            status = os.stat(path)
        return cls(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def change(self) -> str | None:
        """What happened to the file since it was opened, as the end of a sentence; None where it is the same."""
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
        return None


def refuse_changed(files: Iterable[FileIdentity]) -> None:
    """Raise UserError that names the first of `files` that is not what was opened."""
    for file in files:
        if (change := file.change()) is not None:
            raise UserError(
                f"{printable(str(file.path), 500)} {change} after it was opened, so what is read of it now can't be trusted; "
                "open the model again"
            )


@contextmanager
def unchanged(files: tuple[FileIdentity, ...]) -> Iterator[None]:
    """Check these files before and after the block, which reads them.

    Raises UserError that names a changed file and says how it changed, also in place of an error that the block raised.
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
    """Checks files while they are read, ten times a second at most."""

    def __init__(self, files: Iterable[FileIdentity]) -> None:
        self._files = tuple(files)
        self._throttle = Throttle()

    def look(self) -> None:
        """Raise UserError that names the first file which has changed since it was opened."""
        if self._throttle.due():
            refuse_changed(self._files)
