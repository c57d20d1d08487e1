"""Stores files of a hub in the Hugging Face cache, where huggingface_hub and transformers find them.

The cache has a folder for each repository. There, `blobs/` holds the contents of files under their digests, `snapshots/COMMIT/` has
links to them under the names of the files, and `refs/BRANCH` has the commit of a branch. huggingface_hub names a content after the
header `ETag`. Here, names are made only of what was checked: hexadecimal digests, a commit, and the parts of a file's path.

A file is written under a name that ends in `.incomplete`, as huggingface_hub's, and locked until it has its own name. What a killed
process has left is therefore known from what another process is writing.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dtype_engine.checkpoint.hub_reader import content_hash
from dtype_engine.core.atomic_write import write_text_atomic
from dtype_engine.core.export_lock import locked, remove_stale_files

_HERE = f"{zlib.crc32(socket.gethostname().encode()):08x}"
"""Stands for this machine in the names of files that are being written, because locks may not work across a network."""
INCOMPLETE = re.compile(rf".*\.{_HERE}\.[0-9a-f]{{16}}\.incomplete", re.DOTALL)
"""Matches the names of files that are being written, or were when a process was killed, on this machine."""

_PIECE_BYTES = 1 << 20


class CachedRepository:
    """The folder of a repository in the Hugging Face cache."""

    def __init__(self, cache: Path, repository: str) -> None:
        """repository: `org/name`. The caller must have checked that it can't lead out of the cache."""
        self._folder = cache / f"models--{repository.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        """Return the folder with the files of a commit."""
        return self._folder / "snapshots" / commit

    def remove_stale(self) -> None:
        """Remove the unfinished files of killed processes."""
        remove_stale_files(self._folder, INCOMPLETE)

    def holds(self, commit: str, name: str, size: int | None, digest: str | None) -> bool:
        """Return whether the cache has the file `name` of a commit, with this size and the content of this digest. digest:
        hexadecimal, or None if unknown. All hubs have the same cache, so the content may be another hub's.

        A file that is not a link to the content of its digest is read, and then becomes known by a hard link if the file system
        has such.
        """
        path = self.snapshot(commit) / name
        if size is None or not has_size(path, size):
            return False
        if digest is None:
            return True
        blob = self._blob(digest)
        with suppress(OSError):
            if os.path.samefile(path, blob):
                return True
        if not _has_digest(path, size, digest):
            return False
        with suppress(OSError):
            blob.parent.mkdir(exist_ok=True)
            linked = _beside(blob)
            os.link(os.path.realpath(path), linked)
            os.replace(linked, blob)
        return True

    def add(self, commit: str, name: str, size: int, digest: str | None, write: Callable[[IO[bytes]], object]) -> bool:
        """Store the file `name` of a commit. If the cache already has a content of this digest and size, only a link to the content
        is made. Otherwise `write` is called with an open file, to which it must write the content. Returns whether `write` was
        called. digest: hexadecimal, or None if unknown. Raises OSError, and whatever `write` raises; then nothing is stored.
        """
        path = self.snapshot(commit) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if digest is None:
            with written(path) as partial, open(partial, "wb") as file:
                write(file)
            return True
        blob = self._blob(digest)
        is_new = not has_size(blob, size)
        if is_new:
            blob.parent.mkdir(exist_ok=True)
            with written(blob) as partial, open(partial, "wb") as file:
                write(file)
        link = _beside(path)
        try:
            os.symlink(os.path.relpath(blob, path.parent), link)
        except OSError:  # a file system or a system without links
            link = blob
        try:
            os.replace(link, path)
        except OSError:
            if link != blob:
                link.unlink()
            raise
        return is_new

    def _blob(self, digest: str) -> Path:
        return self._folder / "blobs" / digest

    def name_branch(self, branch: str, commit: str) -> None:
        """Record `commit` as the newest of a branch. The caller must have checked that the branch's name can't lead out of the
        cache.
        """
        path = self._folder / "refs" / branch
        path.parent.mkdir(exist_ok=True)
        write_text_atomic(path, commit, replace=True)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A context manager with the path of a temporary file, which is renamed to `path` at the end, or deleted after an error."""
    partial = _beside(path)
    try:
        partial.touch(exist_ok=False)
        with locked(partial):
            yield partial
            os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


def _beside(path: Path) -> Path:
    """Return an unused path of a temporary file for `path`."""
    return path.with_name(f"{path.name}.{_HERE}.{secrets.token_hex(8)}.incomplete")


def _has_digest(path: Path, size: int, digest: str) -> bool:
    hasher = content_hash(digest, size)
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
    except OSError:
        return False
    return bool(hasher.hexdigest() == digest)


def has_size(path: Path, size: int | None) -> bool:
    """Return whether there is a file of `size` bytes at `path`."""
    try:
        return os.path.getsize(path) == size
    except OSError:
        return False
