"""A temporary file that holds vectors: the activations of a scan, and the codes and scales that roundings such as GPTQ chose."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from dataclasses import dataclass

import torch

from dtype_engine.core.errors import UserError
from dtype_engine.core.units import human_bytes


@dataclass(frozen=True, slots=True)
class StoredVector:
    """A vector in a file. start: its offset in bytes. count: the number of its elements. device: where it is read to."""

    start: int
    count: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class TemporaryFile:
    """A file in the folder of the environment variable TMPDIR, or else in /var/tmp, because /tmp often is in memory. The system
    removes it when it is closed, also after a crash.

    path: the `path` of another process's file, which is then only read. instead: what the user can do if the file can't be written,
    apart from using another folder. Raises UserError if the file can't be made, OSError if `path` can't be opened.
    """

    def __init__(self, path: str | None = None, instead: str = "cast fewer weights to dtypes with roundings") -> None:
        self.nbytes = 0
        self.instead = instead
        if path is not None:
            self._file: io.RawIOBase = open(path, "rb", buffering=0)  # noqa: SIM115
            return
        try:
            self._file = tempfile.TemporaryFile(prefix="dtype-engine-", buffering=0, dir=temporary_folder())  # noqa: SIM115
        except OSError as error:
            raise self._no_room(error.strerror) from error

    @property
    def path(self) -> str | None:
        """The path by which other processes of this machine can open the file while this one lives, or None if the system has none
        for a file without a name.
        """
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return path if os.path.exists(path) else None

    def need(self, nbytes: int) -> None:
        """Raise UserError if the file can't grow by `nbytes`, because the disk has fewer free bytes."""
        free = free_for_temporary_files()
        if free < nbytes:
            raise self._no_room(f"{human_bytes(nbytes)} are needed, and {human_bytes(free)} are free")

    def put(self, vector: torch.Tensor, instead_of: StoredVector | None = None) -> StoredVector:
        """Write a vector [n], and return its record. instead_of: the record of a vector of the same size and dtype to overwrite.
        Raises UserError if the file can't be written.
        """
        data = vector.contiguous().view(torch.uint8).cpu()
        if instead_of is not None:
            self._write_at(instead_of.start, data)
            return instead_of
        return StoredVector(self.append(data), len(vector), vector.dtype, vector.device)

    def take(self, stored: StoredVector, part: slice | None = None) -> torch.Tensor:
        """Return the vector for which `put` returned the record `stored`, or only its elements from `part.start` up to `part.stop`.
        The caller may change the vector. Raises UserError if the file can't be read.
        """
        first, last = (0, stored.count) if part is None else (part.start, part.stop)
        size = stored.dtype.itemsize
        return self.bytes_at(stored.start + size * first, size * (last - first)).view(stored.dtype).to(stored.device)

    def clear(self) -> None:
        """Remove everything from the file. What was written can no longer be read."""
        self.nbytes = 0
        self._file.truncate(0)

    def close(self) -> None:
        self._file.close()

    def append(self, data: torch.Tensor) -> int:
        """Write bytes, uint8 [n] on the CPU, at the end of the file. Returns their offset. Raises UserError if it can't."""
        start = self.nbytes
        self._write_at(start, data)
        self.nbytes += len(data)
        return start

    def _write_at(self, start: int, data: torch.Tensor) -> None:
        view, done = data.numpy().data, 0
        try:
            self._file.seek(start)
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            raise self._no_room(error.strerror) from error

    def bytes_at(self, start: int, nbytes: int) -> torch.Tensor:
        """Return `nbytes` bytes from the offset `start` on, uint8 [nbytes] on the CPU. Raises UserError if they can't be read."""
        made = torch.empty(nbytes, dtype=torch.uint8)
        view, done = made.numpy().data, 0
        try:
            self._file.seek(start)
            while done < nbytes:
                count = self._file.readinto(view[done:])
                if not count:
                    raise UserError(f"{temporary_folder()}: the program's temporary file has lost its end: start again")
                done += count
        except OSError as error:
            raise UserError(
                f"{temporary_folder()}: the program can't read its temporary file ({error.strerror}): start again"
            ) from error
        return made

    def _no_room(self, reason: str | None) -> UserError:
        return UserError(
            f"{temporary_folder()}: the program can't write its temporary file here ({reason}): set TMPDIR to a folder with more "
            f"space, or {self.instead}"
        )


def free_for_temporary_files() -> int:
    """Return how many bytes are free where `TemporaryFile` writes."""
    try:
        return shutil.disk_usage(temporary_folder()).free
    except OSError:
        return 0


def temporary_folder() -> str:
    """Return the folder for large temporary files."""
    large = "/var/tmp"
    if "TMPDIR" not in os.environ and os.access(large, os.W_OK):
        return large
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.curdir
