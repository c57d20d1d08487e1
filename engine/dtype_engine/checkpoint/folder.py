"""Opens a checkpoint in any of the common forms on disk: finds its files, and reads their headers.

A folder is opened as the first of these that it matches: a diffusers pipeline (`model_index.json`), a PEFT adapter
(`adapter_config.json`), a Hugging Face model (safetensors before pickles, one file or shards), or its only checkpoint file.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint import crash_watch
from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.file_identity import FileIdentity, refuse_changed
from dtype_engine.checkpoint.file_kind import kind_of
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor, read_header
from dtype_engine.checkpoint.schemes.configuration import declared, refuse_many_entries
from dtype_engine.checkpoint.schemes.own import SCALED_KEY
from dtype_engine.checkpoint.weight_files import (
    ADAPTER_CONFIG,
    INDEX,
    PIPELINE_INDEX,
    SINGLE,
    find_weight_files,
    read_config,
    read_json,
    read_shards,
    resolve_inside,
    set_to_read,
)
from dtype_engine.core.errors import UserError
from dtype_engine.core.gc_pause import gc_paused
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree

_LONG_HEADERS = 1_000_000
_FIRST_SHARD = re.compile(r"model-0*1-of-\d+\.safetensors")


def open_checkpoint(path: Path, trust_pickle: bool = False, absent_shards: bool = False) -> Checkpoint:
    """Return the checkpoint in a folder or file. Raises UserError, which names the file and the problem.

    Only headers are read, except from pickles, which torch reads as a whole. No code in a pickle runs unless `trust_pickle` is set.
    absent_shards: whether files that an index names may be missing. `Checkpoint.index` then has the names of their tensors.
    """
    with gc_paused():
        checkpoint = (
            _open_folder(path, trust_pickle, absent_shards) if path.is_dir() else _open_file(path, trust_pickle)
        )
        for place, config in (
            (checkpoint.folder, checkpoint.config),
            *((component.folder, component.config) for component in checkpoint.components),
        ):  # also of plain weights, since transformers copies and compares all entries
            for settings in (declared(config or {}), (config or {}).get("quantization")):
                refuse_many_entries(settings, f"{place / 'config.json'}", len(checkpoint.tensors))
        if checkpoint.coded:
            from dtype_engine.checkpoint.check.declared import zero_point_sentences

            notices = (*checkpoint.notices, *zero_point_sentences(checkpoint))
            checkpoint = dataclasses.replace(checkpoint, notices=notices)
    crash_watch.watch(checkpoint.identities)
    refuse_changed(checkpoint.identities)
    return checkpoint


def needs_torch(path: Path) -> bool:
    """Return whether a checkpoint is a pickle, whose tensor names only torch can read."""
    if not path.is_dir():
        return kind_of(path) == "pickle"
    try:
        config = read_config(path)
        first = set_to_read(path, config)
        if first is not None and not first.pickled:
            return False  # an index may be large, so it is not read here
        return any(kind_of(file) == "pickle" for file in find_weight_files(path, config).paths)
    except UserError:
        return False


def peek_first_shard(path: Path) -> Tree | None:
    """Return the tree of a checkpoint's first shard, for a screen that can't wait. None if the checkpoint has no large index, so
    that all headers can be read at once, or if the shard can't be read.
    """
    try:
        if not path.is_dir() or os.path.getsize(path / INDEX) < _LONG_HEADERS:
            return None
        config = read_config(path)
        found = set_to_read(path, config)
        if found is None or found.name != INDEX:
            return None
        first = min(entry.name for entry in os.scandir(path) if _FIRST_SHARD.fullmatch(entry.name))
        return Checkpoint(path, (), read_header(resolve_inside(path, first))[0], config).tree()
    except (OSError, ValueError, UserError):
        return None


def _open_file(path: Path, trust_pickle: bool) -> Checkpoint:
    kind = kind_of(path)
    if kind == "pickle":
        return _of_pickles(path, (path,), None, trust_pickle)
    if kind == "gguf":
        return _of_gguf(path)
    identities = (FileIdentity.of(path),)
    tensors, metadata = read_header(path)
    config = read_config(path.parent) if path.name == SINGLE else None
    if config is not None and ((first := set_to_read(path.parent, config)) is None or first.name != SINGLE):
        config = None  # it names another file as its weights
    aliases = _aliases(tensors, metadata)
    return Checkpoint(path, (path,), tensors, config, metadata, identities=identities, aliases=aliases)


def _of_gguf(path: Path) -> Checkpoint:
    from dtype_engine.checkpoint.gguf import read_gguf_model
    from dtype_engine.checkpoint.gguf_model import model_of
    from dtype_engine.checkpoint.schemes.gguf import ROPE_FACTORS

    identities, tensors, fields = read_gguf_model(path)
    config, lost = model_of(fields, tensors)
    files = tuple(file.path for file in identities)
    return Checkpoint(
        files[0],
        files,
        tensors,
        config,
        {name: str(fields[name]) for name in fields if name.startswith(("general.", "quantize."))},
        form="gguf",
        notices=lost,
        identities=identities,
        in_config=frozenset(ROPE_FACTORS) & tensors.keys() if config is not None else frozenset(),
        lost=lost,
    )


def _open_folder(folder: Path, trust_pickle: bool, absent_shards: bool) -> Checkpoint:
    if (folder / PIPELINE_INDEX).is_file():
        return _open_pipeline(folder, absent_shards)
    config = read_config(folder)
    found = find_weight_files(folder, config, absent_shards)
    files = found.paths
    adapter = _is_adapter(folder, config, files)
    if any(kind_of(file) == "pickle" for file in files):
        checkpoint = _of_pickles(folder, files, config, trust_pickle)
    elif kind_of(files[0]) == "gguf":
        return _open_file(files[0], trust_pickle)
    else:
        identities = tuple(map(FileIdentity.of, files))
        tensors, metadata = read_shards(folder, files)
        notices: tuple[str, ...] = ()
        if found.read_by is not None and found.read_by.variant is not None:
            variant = printable(found.read_by.variant)
            notices = (f"read from the files of the variant {variant}, the only ones there are",)
        aliases = _aliases(tensors, metadata)
        checkpoint = Checkpoint(
            folder, files, tensors, config, metadata, notices=notices, identities=identities, aliases=aliases
        )
    unread = found.unread
    if found.weight_map is not None and found.index is not None:
        from dtype_engine.checkpoint.completeness import compare_index

        index = compare_index(folder, found.index, found.weight_map, checkpoint.tensors, files)
        checkpoint = dataclasses.replace(checkpoint, index=index, notices=checkpoint.notices + index.sentences)
        left_out = {file.name for file in index.left_out}
        unread = tuple(name for name in unread if name not in left_out)
    checkpoint = dataclasses.replace(checkpoint, read_by=found.read_by, passed_over=unread)
    checkpoint = dataclasses.replace(checkpoint, notices=(*checkpoint.notices, *checkpoint.of_sets))
    return _as_adapter(checkpoint) if adapter else checkpoint


def is_adapter(path: Path) -> bool:
    """Return whether `open_checkpoint` opens a path as a PEFT adapter. Raises UserError if a folder can't be read."""
    if not (path / ADAPTER_CONFIG).is_file() or (path / PIPELINE_INDEX).is_file():
        return False
    config = read_config(path)
    return config is None or _is_adapter(path, config, find_weight_files(path, config).paths)


def _is_adapter(folder: Path, config: dict[str, Any] | None, files: tuple[Path, ...]) -> bool:
    return (folder / ADAPTER_CONFIG).is_file() and (config is None or files[0].name.startswith("adapter_model."))


def _as_adapter(checkpoint: Checkpoint) -> Checkpoint:
    base = str(read_json(checkpoint.path / ADAPTER_CONFIG).get("base_model_name_or_path") or "an unnamed model")
    notice = f"a PEFT adapter for {printable(base, 200)}: these are its own tensors, the base model is not among them"
    return dataclasses.replace(
        checkpoint, config=None, form="adapter", base=base, notices=(*checkpoint.notices, notice)
    )


def _aliases(tensors: Mapping[str, CheckpointTensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the names of tied weights that safetensors' `save_model` left out, each mapped to the name that is in the file."""
    return {
        name: kept
        for name, kept in metadata.items()
        if (kept in tensors or SCALED_KEY + kept in metadata)
        and not (not name or name == "format" or name in tensors or name.startswith(SCALED_KEY))
    }


def _of_pickles(path: Path, files: tuple[Path, ...], config: dict[str, Any] | None, trust_pickle: bool) -> Checkpoint:
    from dtype_engine.checkpoint.pickles import read_pickles

    identities = tuple(map(FileIdentity.of, files))
    tensors, values, aliases, notices = read_pickles(files, trust_pickle)
    return Checkpoint(
        path, files, tensors, config, form="pickle", values=values, notices=notices, identities=identities,
        aliases=aliases,
    )  # fmt: skip


def _open_pipeline(folder: Path, absent_shards: bool) -> Checkpoint:
    from dtype_engine.checkpoint.components import pipeline_notices, read_components

    index = read_json(folder / PIPELINE_INDEX)
    components, tensors = read_components(folder, index, absent_shards)
    if not tensors:
        raise UserError(f"{folder}: no component of this diffusers pipeline has safetensors weights")
    shown = [component for component in components if not component.pickled]
    return Checkpoint(
        folder,
        tuple(file for component in shown for file in component.files),
        tensors,
        form="diffusers",
        notices=pipeline_notices(components),
        identities=tuple(identity for component in shown for identity in component.identities),
        components=components,
    )
