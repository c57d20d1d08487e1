"""Writes the folder of an export under a temporary name next to its target, and renames it to the target once it is complete."""

from __future__ import annotations

import fnmatch
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from dtype_engine.checkpoint import resolve_inside
from dtype_engine.checkpoint.schemes.registry import schemes
from dtype_engine.checkpoint.weight_files import refuse_link_out
from dtype_engine.core.atomic_write import fsync_dir, umask
from dtype_engine.core.errors import UserError
from dtype_engine.core.export_lock import OLD, PARTIAL, REPLACED, locked, sibling
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes

_IN_FOLDERS = ("*_Pooling/config.json", "*_Dense/config.json", "*_Dense/model.safetensors")
"""How sentence-transformers makes one vector of a text (`checkpoint/embedding_modules.py`)."""
ALONG = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "normalizer.json", "*.model", "*.spm", "*.tiktoken", "chat_template.*",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "feature_extractor_config.json",
    "configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py", "image_processing_*.py",
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", *_IN_FOLDERS,
    "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Patterns for the names of the files that an export copies unchanged, relative to the folder."""
_LARGEST = 1 << 30
_SLACK = 1 << 20
"""The number of bytes that must be free on the disk in addition to the size of the weights, for headers and small files."""


def need_space(target: Path, needed: int) -> None:
    """Raise UserError if the disk of an export's target has less free space than the `needed` bytes of the weights."""
    needed, free = needed + _SLACK, shutil.disk_usage(target.parent).free
    if free < needed:
        raise UserError(
            f"exporting to {target} needs {human_bytes(needed)} and {human_bytes(free)} are free there; free some space or name "
            "a path elsewhere"
        )


@contextmanager
def staged(target: Path, needed: int, force: bool = False) -> Iterator[Path]:
    """Yield a new folder next to `target` to write into. If the `with` block ends without an error, all data is flushed to the disk
    and the folder is renamed to `target`; otherwise, the folder is removed.

    needed: the number of bytes that must be free on the disk. force: whether to replace an existing folder. Raises UserError if too
    little space is free or writing fails.
    """
    need_space(target, needed)
    stage, named = sibling(target, PARTIAL), False
    try:
        stage.mkdir(0o700)
        with locked(stage):
            yield stage
            os.chmod(stage, 0o777 & ~umask())
            _sync_all(stage)
            # The lock lasts until the folder is renamed. If this process ends before, the next export recognizes its folder.
            _give_name(stage, target, force)
            named = True
        fsync_dir(target)
        fsync_dir(target.parent)
    except OSError as error:
        raise UserError(f"exporting to {target} failed: {error.strerror}; nothing was left there") from error
    finally:
        if not named:
            shutil.rmtree(stage, ignore_errors=True)


def _sync_all(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            os.chmod(entry, 0o777 & ~umask())
            _sync_all(entry)
        else:
            with open(entry, "rb") as file:
                os.fsync(file.fileno())
    fsync_dir(folder)


def _give_name(stage: Path, target: Path, force: bool) -> None:
    """Rename the complete `stage` to `target`. An existing folder is moved aside as a whole, so it is never partly deleted."""
    if not force or not target.is_dir() or not any(target.iterdir()):
        os.rename(stage, target)
        return
    replaced = sibling(target, REPLACED)
    try:
        replaced.mkdir(0o700)
        with locked(replaced):
            os.rename(target, replaced / OLD)
            try:
                os.rename(stage, target)
            finally:
                if not os.path.lexists(target):
                    os.rename(replaced / OLD, target)
    finally:
        if os.path.lexists(target):
            shutil.rmtree(replaced, ignore_errors=True)


def copy_sidecars(source: Path, stage: Path, of_quantiser: bool = False) -> tuple[str, ...]:
    """Copy the tokenizer and processor files of the checkpoint folder `source` to `stage` and, if `of_quantiser`, the settings
    files of the program that quantized the checkpoint. Returns notices about files that were not copied. Only regular files with
    known names are copied. Links that lead out of the folder are not followed, except links within the Hugging Face cache.
    """
    notices = []
    settings = {name for scheme in schemes() for name in scheme.settings_files} if of_quantiser else ()
    for entry in sorted((*source.iterdir(), *chain.from_iterable(map(source.glob, _IN_FOLDERS)))):
        wanted, name = (*ALONG, *settings), entry.relative_to(source).as_posix()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted):
            continue
        try:
            refuse_link_out(source, name.partition("/")[0])
            real = resolve_inside(entry.parent, entry.name).resolve(strict=True)
        except UserError as error:
            notices.append(f"not copied: {error}")
            continue
        status = os.stat(real)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            notices.append(f"not copied: {printable(name)} is no regular file under {human_bytes(_LARGEST)}")
            continue
        (stage / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(real, stage / name)
    return tuple(notices)
