"""Reads an exported folder with the loader of the safetensors package."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dtype_engine.checkpoint.schemes.own import SCALED_KEY
from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.text import printable


@dataclass(slots=True)
class ExportedValues:
    """The tensors and metadata of an exported checkpoint."""

    read: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """Reads each tensor, keyed by name."""
    metadata: dict[str, str] = field(default_factory=dict)
    misplaced: dict[str, str] = field(default_factory=dict)
    """What is wrong with each tensor that is in two files, or in another file than the index says, keyed by name."""


def read_export(folder: Path, copied: frozenset[str] = frozenset()) -> ExportedValues:
    """Open all weights files of an exported checkpoint, except those that were copied from the source. copied: the paths of copied
    files, relative to `folder`. In a pipeline, the name of a tensor begins with the name of its component, such as "unet.". Raises
    UserError if there are no weights files, or if safetensors can't read one of them.
    """
    exported = ExportedValues()
    held: dict[str, str] = {}
    parts = [("", folder)]
    if (folder / "model_index.json").exists():
        parts += [(f"{entry.name}.", entry) for entry in sorted(folder.iterdir()) if entry.is_dir()]
    try:
        for prefix, part_folder in parts:
            indexed = {prefix + name: file for name, file in _index(part_folder).items()}
            for file in sorted(part_folder.glob("*.safetensors")):
                if file.relative_to(folder).as_posix() in copied:
                    continue
                handle: Any = safe_open(file, framework="pt")
                for key, value in (handle.metadata() or {}).items():
                    name = key.removeprefix(SCALED_KEY)  # the rest of such a key is a tensor's name
                    exported.metadata[key.removesuffix(name) + prefix + name] = value
                for own_name in list(handle.keys()):
                    name = prefix + own_name
                    if name in held:
                        exported.misplaced[name] = f"is in {held[name]} and again in {file.name}"
                        continue
                    held[name] = file.name
                    exported.read[name] = partial(handle.get_tensor, own_name)
                    if indexed and (indexed_file := indexed.get(name)) != file.name:
                        where = f"names {printable(indexed_file)}" if indexed_file is not None else "does not list it"
                        exported.misplaced[name] = f"is in {file.name}, but the index {where}"
            exported.misplaced |= {
                name: f"is not in {printable(str(file))}, which the index names"
                for name, file in indexed.items()
                if name not in exported.read
            }
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: safetensors can't read this export: {one_line(error)}") from None
    if not exported.read:
        raise UserError(f"{folder} has no safetensors files, so there is nothing to verify")
    return exported


def _index(folder: Path) -> dict[str, str]:
    for file in sorted(folder.glob("*.safetensors.index.json")):
        read = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(read, dict) and isinstance(read.get("weight_map"), dict):
            return {str(name): str(file_name) for name, file_name in read["weight_map"].items()}
    return {}
