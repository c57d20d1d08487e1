"""Opens a checkpoint in any of the common forms on disk: finds its files, and reads their headers.

A folder is opened as the first of these that it matches: a diffusers pipeline (`model_index.json`), a PEFT adapter
(`adapter_config.json`), a Hugging Face model (safetensors before pickles, one file or shards), or its only checkpoint file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.checkpoint.file_identity import FileIdentity, refuse_changed
from dtype_engine.checkpoint.file_kind import kind_of
from dtype_engine.checkpoint.prequantized import SCALED_KEY
from dtype_engine.checkpoint.safetensors_header import (
    CheckpointTensor,
    read_header,
)
from dtype_engine.checkpoint.weight_files import (
    INDEX,
    PIPELINE_INDEX,
    SINGLE,
    find_weight_files,
    index_of,
    read_config,
    read_index,
    read_json,
    read_shards,
    resolve_inside,
    variant_of,
)
from dtype_engine.core.errors import UserError
from dtype_engine.core.gc_pause import gc_paused
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree

ADAPTER_CONFIG = "adapter_config.json"
"""The file that PEFT writes next to an adapter's weights."""
_LONG_HEADERS = 1_000_000


def open_checkpoint(path: Path, trust_pickle: bool = False) -> Checkpoint:
    """Return the checkpoint in a folder or file. Raises UserError, which names the file and the problem.

    Only headers are read, except from pickles, which torch reads as a whole. No code in a pickle runs unless `trust_pickle` is set.
    """
    with gc_paused():
        checkpoint = _open_folder(path, trust_pickle) if path.is_dir() else _open_file(path, trust_pickle)
    refuse_changed(checkpoint.identities)
    return checkpoint


def needs_torch(path: Path) -> bool:
    """Return whether a checkpoint is a pickle, whose tensor names can only be read with torch."""
    if (path / INDEX).exists() or (path / SINGLE).exists():
        return False
    if path.is_dir():
        try:
            files = find_weight_files(path)
        except UserError:
            return False
        return any(kind_of(file) == "pickle" for file in files)
    return kind_of(path) == "pickle"


def peek_first_shard(path: Path) -> Tree | None:
    """Return the tree of a large checkpoint's first shard, for a screen that can't wait until all headers are read. Returns None
    for a small checkpoint, whose headers can all be read at once.
    """
    try:
        if not path.is_dir() or os.path.getsize(path / INDEX) < _LONG_HEADERS:
            return None
        first = min(entry.name for entry in os.scandir(path) if entry.name.endswith(".safetensors"))
        return Checkpoint(path, (), read_header(resolve_inside(path, first))[0], read_config(path)).tree()
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
    aliases = _aliases(tensors, metadata)
    return Checkpoint(path, (path,), tensors, config, metadata, identities=identities, aliases=aliases)


def _of_gguf(path: Path) -> Checkpoint:
    from dtype_engine.checkpoint.gguf_parts import read_gguf_model
    from dtype_engine.checkpoint.schemes.gguf import model_of
    from dtype_engine.checkpoint.schemes.gguf_rope import TENSORS

    contents = read_gguf_model(path)
    tensors, fields = contents.tensors, contents.fields
    model = model_of(fields, tensors)
    return Checkpoint(
        contents.files[0],
        contents.files,
        tensors,
        model.config,
        {name: str(fields[name]) for name in fields if name.startswith(("general.", "quantize."))},
        form="gguf",
        notices=model.lost,
        identities=contents.identities,
        in_config=TENSORS & tensors.keys() if model.config is not None else frozenset(),
        lost=model.lost,
    )


def _open_folder(folder: Path, trust_pickle: bool) -> Checkpoint:
    if (folder / PIPELINE_INDEX).is_file():
        return _open_pipeline(folder)
    config = read_config(folder)
    index_file = index_of(folder)
    weight_map = read_index(index_file) if index_file is not None else None
    files = find_weight_files(folder, weight_map)
    adapter = (folder / ADAPTER_CONFIG).is_file() and (config is None or files[0].name.startswith("adapter_model."))
    if any(kind_of(file) == "pickle" for file in files):
        checkpoint = _of_pickles(folder, files, config, trust_pickle)
        return _as_adapter(checkpoint) if adapter else checkpoint
    if kind_of(files[0]) == "gguf":
        return _open_file(files[0], trust_pickle)
    identities = tuple(map(FileIdentity.of, files))
    tensors, metadata = read_shards(folder, files)
    variant = variant_of(files[0].name)
    notices: tuple[str, ...] = ()
    if variant:
        notices = (f"read from the files of the variant {printable(variant)}, the only ones there are",)
    index = None
    if weight_map is not None:
        from dtype_engine.checkpoint.completeness import compare_index

        index = compare_index(folder, weight_map, tensors, files)
        notices += index.sentences
    checkpoint = Checkpoint(
        folder,
        files,
        tensors,
        config,
        metadata,
        notices=notices,
        identities=identities,
        aliases=_aliases(tensors, metadata),
        index=index,
    )
    return _as_adapter(checkpoint) if adapter else checkpoint


def _as_adapter(checkpoint: Checkpoint) -> Checkpoint:
    base = str(read_json(checkpoint.path / ADAPTER_CONFIG).get("base_model_name_or_path") or "an unnamed model")
    notice = f"a PEFT adapter for {printable(base, 200)}: these are its own tensors, the base model is not among them"
    return dataclasses.replace(
        checkpoint, config=None, form="adapter", base=base, notices=(*checkpoint.notices, notice)
    )


def _aliases(tensors: Mapping[str, CheckpointTensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the omitted names of tied weights: a mapping from each such name to the name of the tensor that holds the values.

    safetensors' `save_model` writes a tied weight once. The header's `metadata` maps each name that was left out to the name that
    was kept. tensors: all tensors of the files, by name.
    """
    return {
        name: kept
        for name, kept in metadata.items()
        if (kept in tensors or SCALED_KEY + kept in metadata)
        and not (not name or name == "format" or name in tensors or name.startswith(SCALED_KEY))
    }


def _of_pickles(path: Path, files: tuple[Path, ...], config: dict[str, Any] | None, trust_pickle: bool) -> Checkpoint:
    from dtype_engine.checkpoint.pickles import read_pickles

    identities = tuple(map(FileIdentity.of, files))
    pickled = read_pickles(files, trust_pickle)
    return Checkpoint(
        path, files, pickled.tensors, config, form="pickle", values=pickled.values, notices=pickled.notices,
        identities=identities, aliases=pickled.aliases,
    )  # fmt: skip


def _open_pipeline(folder: Path) -> Checkpoint:
    from dtype_engine.checkpoint.components import pipeline_notices, read_components

    index = read_json(folder / PIPELINE_INDEX)
    components, tensors = read_components(folder, index)
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
