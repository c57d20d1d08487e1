"""Stores files of a hub in the Hugging Face cache, where huggingface_hub and transformers find them.

The cache has a folder for each repository. There, `blobs/` holds the contents of files under their digests, `snapshots/COMMIT/` has
links to them under the names of the files, and `refs/BRANCH` has the commit of a branch. huggingface_hub names a content after the
header `ETag`. Here, names are made only of what was checked: hexadecimal digests, a commit, and the parts of a file's path.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dtype_engine.core.atomic_write import write_text_atomic

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""The SHA-1 of a git object, or the SHA-256 of a large file."""


class CachedRepository:
    """The folder of a repository in the Hugging Face cache."""

    def __init__(self, cache: Path, repository: str) -> None:
        """repository: `org/name`. The caller must have checked that it can't lead out of the cache."""
        self._folder = cache / f"models--{repository.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        """Return the folder with the files of a commit."""
        return self._folder / "snapshots" / commit

    def holds(self, commit: str, name: str, size: int | None) -> bool:
        return has_size(self.snapshot(commit) / name, size)

    def add(self, commit: str, name: str, size: int, digest: str | None, write: Callable[[IO[bytes]], object]) -> bool:
        """Store the file `name` of a commit. If the cache already has a content of this digest and size, only a link to the content
        is made. Otherwise `write` is called with an open file, to which it must write the content. Returns whether `write` was
        called. digest: as the hub gives it, or None if unknown. Raises OSError, and whatever `write` raises; then nothing is
        stored.
        """
        path = self.snapshot(commit) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if digest is None or _DIGEST.fullmatch(digest) is None:
            with written(path) as partial, open(partial, "wb") as file:
                write(file)
            return True
        blob = self._folder / "blobs" / digest
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
        os.replace(link, path)
        return is_new

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
        yield partial
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


def _beside(path: Path) -> Path:
    """Return the path of this thread's temporary file for `path`. Its name ends like those of huggingface_hub's temporary files."""
    return path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.incomplete")


def has_size(path: Path, size: int | None) -> bool:
    """Return whether there is a file of `size` bytes at `path`."""
    try:
        return os.path.getsize(path) == size
    except OSError:
        return False
