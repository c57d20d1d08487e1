"""Recognising a folder that this program has exported, so that `--force` replaces no other folder.

An exported folder has two files: `recipe.yaml`, which begins as this program writes recipes, and `README.md`, whose second
paragraph names the version that wrote the folder. Every version since 0.1.0 writes both.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

from dtype_engine.checkpoint import read_json
from dtype_engine.checkpoint.components import PIPELINE_INDEX, component_names
from dtype_engine.core.errors import UserError

_RECIPE = re.compile(r"version: \d+\n(model: .*\n)?rules:")
_README = re.compile(r"# .*\n\n`.*`, cast by the rules in `recipe\.yaml` and written by dtype-engine \d+\.\d+")
_MOST_READ = 1 << 16


def missing_mark(folder: Path) -> str | None:
    """Explain why a folder is not an export of this program, in words that complete a sentence. Returns None for an export."""
    for name, mark in (("recipe.yaml", _RECIPE), ("README.md", _README)):
        text = _text(folder / name)
        if text is None:
            return f"has no {name} of an export"
        if mark.match(text) is None:
            return f"has a {name} that dtype-engine did not write"
    known = _component_folders(folder)
    foreign = next((entry for entry in sorted(folder.iterdir()) if entry.is_dir() and entry.name not in known), None)
    return f"holds the folder {foreign.name}" if foreign is not None else None


def _text(file: Path) -> str | None:
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return None
        with open(file, encoding="utf-8", newline="\n") as opened:
            return opened.read(_MOST_READ)
    except (OSError, UnicodeDecodeError):
        return None


def _component_folders(folder: Path) -> frozenset[str]:
    """Return the names of the component folders in an exported pipeline."""
    try:
        return frozenset(component_names(read_json(folder / PIPELINE_INDEX)))
    except UserError:
        return frozenset()
