"""Checks the folder or file to which an export is to be written. A folder that exists is replaced only if its `recipe.yaml` and the
second paragraph of its `README.md` show that it is an earlier export of this program. Every version since 0.1.0 writes both.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dtype_engine.checkpoint.components import component_names
from dtype_engine.checkpoint.weight_files import PICKLES, PIPELINE_INDEX, read_json
from dtype_engine.core.atomic_write import check_target, expanded_target, is_taken
from dtype_engine.core.errors import UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.text import printable

_MARKS = {
    "recipe.yaml": re.compile(r"version: \d+\n(model: .*\n)?rules:"),
    "README.md": re.compile(
        r"(?:---\n(?:(?!---\n).*\n)*---\n+)?"
        r"# .*\n\n`.*`, cast by the rules in `recipe\.yaml` and written by dtype-engine \d+\.\d+"
    ),
}
"""Maps the name of a file in an export to a pattern for the beginning of its text. The metadata of a model card may come first."""
_MOST_READ = 1 << 16


def check_typed_path(typed: str, for_export: bool, source: Path | None) -> bool:
    """Return whether saving to the path that the user typed replaces something. for_export: whether a checkpoint is saved, not a
    single file such as a report. source: the model that is exported, which is never replaced. Raises UserError if nothing can be
    saved there.
    """
    taken, path = is_taken(typed), Path(typed)
    if for_export:
        check_export(path, True, [source] if source is not None else [])
    else:
        check_target(path, True)
    return taken


def is_one_file(target: Path) -> bool:
    """Return whether an export to `target` is one file of weights rather than a folder, as the ending of the name decides."""
    return target.name.endswith((".safetensors", *PICKLES))


def check_export(target: Path, force: bool = False, keep: Iterable[Path] = ()) -> Path:
    """Check that an export can be written to `target`, a folder or one file, and return its absolute path. Raises UserError if it
    can't be created, or if it exists and must not be replaced. force: whether a file, or an earlier export of this program, may be
    replaced. keep: files that are never replaced.
    """
    if not is_one_file(target):
        return check_folder(target, force, keep)
    target = check_target(target, force)
    if any(file.resolve() == target.resolve() for file in keep):
        raise UserError(f"{target} is the model that is to be exported, and that is never replaced; name another file")
    return target


def check_folder(target: Path, force: bool = False, keep: Iterable[Path] = ()) -> Path:
    """Check that an export can be written to a folder, as `check_export` does, and return its absolute path. Raises UserError. The
    current folder is never replaced, nor a folder that contains a file of `keep`.
    """
    target = expanded_target(target)
    if not target.name:
        raise UserError(f"{target} can't be exported to: name a new folder")
    if target.is_symlink() and target.is_dir():
        raise UserError(f"{target} is a link to the folder {target.resolve()}; name that folder itself")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserError(f"{target} exists and is no folder; name another one")
    if target.is_dir() and any(target.iterdir()):
        if not force:
            raise UserError(f"{target} exists and is not empty; name another folder{hint('replace')}")
        _refuse_to_replace(target, keep)
    if not target.parent.is_dir():
        raise UserError(f"there is no folder {target.parent} to export to")
    return target


def _refuse_to_replace(target: Path, keep: Iterable[Path]) -> None:
    real = target.resolve()
    if any(file.resolve().is_relative_to(real) or file.absolute().is_relative_to(target) for file in keep):
        raise UserError(
            f"{target} holds the model that is to be exported, and that is never replaced; name another folder"
        )
    if Path.cwd().is_relative_to(real):
        raise UserError(f"{target} is the folder that this runs in, and is not replaced; name another one")
    objection = "is a mount point" if os.path.ismount(target) else missing_mark(target)
    if objection is not None:
        raise UserError(f"{target} {printable(objection)}, so it is no export and is not replaced; name another one")


def is_export(folder: Path) -> bool:
    """Return whether this program wrote the `recipe.yaml` or the `README.md` in a folder."""
    return any(mark.match(_text(folder / name) or "") is not None for name, mark in _MARKS.items())


def missing_mark(folder: Path) -> str | None:
    """Return why a folder is not an export of this program, such as `has no recipe.yaml of an export`, or None if it is one."""
    for name, mark in _MARKS.items():
        text = _text(folder / name)
        if text is None:
            return f"has no {name} of an export"
        if mark.match(text) is None:
            return f"has a {name} that dtype-engine did not write"
    known: tuple[str, ...] = ()
    with suppress(UserError):  # there is none in the export of a single model
        known = component_names(read_json(folder / PIPELINE_INDEX))
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
