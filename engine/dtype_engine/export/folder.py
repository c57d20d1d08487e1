"""The folder that an export goes to: written beside its target, renamed when whole. The source is never written to."""

from __future__ import annotations

import fnmatch
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint import inside
from ..errors import UserError
from ..report_text import human_bytes
from ..text import printable

_ALONG = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "normalizer.json", "*.model", "*.spm", "*.tiktoken", "chat_template.*",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "feature_extractor_config.json",
    "configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py", "image_processing_*.py",
    "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files that belong to a model beside its weights and its configuration."""
_LARGEST = 1 << 30
_SLACK = 1 << 20
"""Bytes left for headers and small files."""


def free_name(target: Path) -> Path:
    """The folder to write, its parent resolved. Raises UserError when it holds something, or can't be made there."""
    target = target.expanduser().absolute()
    if not target.name:
        raise UserError(f"{target} can't be exported to: name a new folder")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserError(f"{target} exists and is no folder; name another one")
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"{target} exists and is not empty; name another folder, or remove it first")
    if not target.parent.is_dir():
        raise UserError(f"there is no folder {target.parent} to export to")
    return target


@contextmanager
def staged(target: Path, needed: int) -> Iterator[Path]:
    """A new folder beside `target` to write into, which gets its name when the block ends well, and vanishes otherwise.

    Raises UserError when fewer than `needed` bytes are free, when the disk fills up nevertheless, or can't be written to.
    """
    free = shutil.disk_usage(target.parent).free
    if free < needed + _SLACK:
        raise UserError(
            f"exporting to {target} needs {human_bytes(needed)} and {human_bytes(free)} are free there; free some space or name "
            "a folder elsewhere"
        )
    stage: Path | None = None
    try:
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.partial-", dir=target.parent))
        yield stage
        os.chmod(stage, 0o777 & ~_umask())
        os.rename(stage, target)
        stage = None
    except OSError as error:
        raise UserError(f"exporting to {target} failed: {error.strerror}; nothing was left there") from error
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)


def _umask() -> int:
    """The process's umask, read without setting it where the system tells."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except (OSError, ValueError):
        pass
    return 0o022


def copy_along(source: Path, stage: Path) -> tuple[str, ...]:
    """Copy tokenizer, processor and the like from a checkpoint's folder. Notices of those that were not copied.

    Only regular files with known names, and no link that leads out of the folder (but for the Hugging Face cache's own).
    """
    notices = []
    for entry in sorted(source.iterdir()):
        if not any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in _ALONG):
            continue
        try:
            real = inside(source, entry.name).resolve(strict=True)
        except UserError as error:
            notices.append(f"not copied: {error}")
            continue
        status = os.stat(real)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            notices.append(f"not copied: {printable(entry.name)} is no regular file under {human_bytes(_LARGEST)}")
            continue
        shutil.copyfile(real, stage / entry.name)
    return tuple(notices)
