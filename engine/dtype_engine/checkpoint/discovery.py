"""Finds the models that a user could open: checkpoints in a folder, and models in the Hugging Face cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dtype_engine.checkpoint.source import hub_cache
from dtype_engine.checkpoint.weight_sets import likely_files

_FILES = (".safetensors", ".gguf", ".pth", ".pt", ".ckpt", ".bin")
_MARKS = ("config.json", "model_index.json", "adapter_config.json")
_LIMIT = 200
"""The maximum number of entries of a folder that are examined, and of models in the Hugging Face cache that are listed."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine that the user could open."""

    model: str
    """The text that names this model for the function `locate`, such as a path or a Hugging Face id."""
    place: str
    """Where the model was found, in a few words for the user."""
    nbytes: int | None
    """The size of the model's weights files in bytes, or None if it is unknown."""
    modified: float
    """The time at which the model's files were last changed, in seconds since 1970."""


def find_models(folder: Path) -> list[LocalModel]:
    """Return the checkpoints in `folder` (only `folder` if it is a checkpoint itself), newest first, and then the models in the
    Hugging Face cache, newest first.
    """
    return sorted(_of_folder(folder), key=_newest_first) + sorted(_of_cache(), key=_newest_first)[:_LIMIT]


def _newest_first(model: LocalModel) -> tuple[float, str]:
    return (-model.modified, model.model)


def _of_folder(folder: Path) -> Iterator[LocalModel]:
    entries = _entries(folder)
    if any(entry.name in _MARKS for entry in entries):
        yield _checkpoint(".", "this folder", entries)
        return  # its files are its shards
    for entry in entries:
        try:
            if entry.is_dir():
                inside = _entries(Path(entry.path))
                if any(part.name in _MARKS or part.name.endswith((".safetensors", ".gguf")) for part in inside):
                    yield _checkpoint(f"{entry.name}/", "this folder", inside)
            elif entry.name.endswith(_FILES):
                status = entry.stat()
                yield LocalModel(entry.name, "this folder", status.st_size, status.st_mtime)
        except OSError:
            continue


def _of_cache() -> Iterator[LocalModel]:
    for entry in _entries(hub_cache()):
        kind, _, name = entry.name.partition("--")
        if kind != "models" or "--" not in name:
            continue
        snapshots = sorted(_entries(Path(entry.path, "snapshots")), key=lambda entry: _size_and_time(entry)[1])
        files = _entries(Path(snapshots[-1].path)) if snapshots else []
        if any(file.name in _MARKS or file.name.endswith(_FILES) for file in files):
            yield _checkpoint(name.replace("--", "/", 1), "Hugging Face cache", files)


def _checkpoint(model: str, place: str, files: list[os.DirEntry[str]]) -> LocalModel:
    found = [(file, *_size_and_time(file)) for file in files]
    of_model = likely_files([file.name for file in files])
    weights = [size for file, size, _ in found if file.name in of_model]
    nbytes = sum(weights or (size for file, size, _ in found if file.name.endswith(_FILES)))
    return LocalModel(model, place, nbytes or None, max((modified for *_, modified in found), default=0.0))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry, _ in zip(entries, range(_LIMIT), strict=False) if not entry.name.startswith(".")]
    except OSError:
        return []


def _size_and_time(entry: os.DirEntry[str]) -> tuple[int, float]:
    try:
        status = entry.stat()
    except OSError:
        return 0, 0.0
    return status.st_size, status.st_mtime
