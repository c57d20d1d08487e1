"""What MODEL on the command line means, found out without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..checkpoint import Checkpoint, open_checkpoint
from ..errors import UserError
from ..text import printable

DEMO = Path(__file__).parent.parent / "demo"
_PICKLES = (".pth", ".pt", ".bin", ".ckpt")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """A model that was found but not opened: a checkpoint at `path`, or `attribute` of a Python file or module."""

    kind: Literal["checkpoint", "python"]
    title: str
    path: Path | None = None
    module: str | None = None
    attribute: str | None = None

    def open(self) -> Checkpoint | None:
        """The checkpoint's headers; None for a Python source, which has none. Raises UserError."""
        return open_checkpoint(self.path) if self.kind == "checkpoint" and self.path is not None else None


def locate(model: str | None) -> Source:
    """Find what `model` means: a folder or file of a checkpoint, `file.py:Name`, `package.module:Name`, a Hugging
    Face id in the local cache, or None for the built-in demo. Raises UserError that says what was looked for.
    """
    if model is None:
        return Source("checkpoint", "demo", DEMO)
    path = Path(model).expanduser()
    if path.is_dir():
        return Source("checkpoint", printable(path.resolve().name), path)
    if path.exists():
        return _file(path)
    before, colon, attribute = model.rpartition(":")
    if colon and before:
        return _python(before, attribute)
    if model.endswith(".py"):
        raise UserError(f"there is no file {model}")
    if _HUB_ID.fullmatch(model) and (snapshot := _cached(model)) is not None:
        return Source("checkpoint", model, snapshot)
    raise UserError(
        f"{printable(model)}: no such folder or file, and no Hugging Face model of this name is in the local cache ({_cache()})"
    )


def _file(path: Path) -> Source:
    if path.suffix == ".safetensors":
        return Source("checkpoint", printable(path.name), path)
    if path.suffix == ".py":
        raise UserError(f"{path} is a Python file: add the class or function that makes the model, as in {path}:Name")
    if path.suffix in _PICKLES:
        raise UserError(f"{path} is a PyTorch pickle; convert it to safetensors first")
    raise UserError(f"{path} is no checkpoint: give a folder, a .safetensors file, or file.py:Name")


def _python(place: str, attribute: str) -> Source:
    if not attribute.isidentifier():
        raise UserError(f"{printable(attribute)!r} is not the name of a class or function: write file.py:Name")
    if place.endswith(".py"):
        path = Path(place).expanduser()
        if not path.is_file():
            raise UserError(f"there is no file {place}")
        return Source("python", f"{path.name}:{attribute}", path=path, attribute=attribute)
    if not _DOTTED.fullmatch(place):
        raise UserError(
            f"{printable(place)!r} is neither a Python file nor a module: write file.py:Name or package.module:Name"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(place)
    except (ImportError, ValueError, AttributeError):
        found = None
    if found is None:
        raise UserError(f"there is no Python module {place} here; give its file as file.py:{attribute}")
    return Source("python", f"{place}:{attribute}", module=place, attribute=attribute)


def _cache() -> Path:
    """The Hugging Face hub's cache folder, by the same variables as huggingface_hub (whose import takes too long
    here).
    """
    if hub := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(hub).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def _cached(model: str) -> Path | None:
    """The snapshot that `main` stands for, or the only one there is."""
    folder = _cache() / f"models--{model.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
        named = folder / "snapshots" / revision
        if re.fullmatch(r"[0-9a-f]{7,64}", revision) and named.is_dir():
            return named
    except (OSError, UnicodeDecodeError):
        pass
    try:
        snapshots = [entry for entry in (folder / "snapshots").iterdir() if entry.is_dir()]
    except OSError:
        return None
    return snapshots[0] if len(snapshots) == 1 else None
