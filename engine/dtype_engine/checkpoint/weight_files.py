"""Finds the weights files of a folder (`weight_sets.py` says which they are). The content of an index file is untrusted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.named_files import SETTINGS, named_files
from dtype_engine.checkpoint.safetensors_header import MOST_TENSORS, CheckpointTensor, read_header, too_many_tensors
from dtype_engine.checkpoint.weight_sets import WeightSet, unread_weights, weight_sets
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import read_regular, reading
from dtype_engine.core.text import printable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIPELINE_INDEX = "model_index.json"
"""The file in a diffusers pipeline that lists its components."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file that PEFT writes next to an adapter's weights."""
PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pth.tar")
LARGEST_JSON = 50_000_000
_NEVER_OPENED = (
    ".safetensors", ".gguf", *PICKLES, ".onnx", ".h5", ".msgpack", ".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf",
    ".html", ".csv", ".parquet", ".ipynb", ".log", ".zip", ".gz",
)  # fmt: skip
"""The ends of names of files from which no tokenizer, processor or scheduler is read."""
_OPENED_FOLDERS = re.compile(r"additional_chat_templates|tokenizer|processor|extractor")
"""Matches the names of the folders from which transformers reads templates and parts of a processor."""


def read_shards(folder: Path, files: Iterable[Path]) -> tuple[dict[str, CheckpointTensor], dict[str, str]]:
    """Return the tensors and the metadata of several safetensors files together, each by name. Raises UserError."""
    tensors: dict[str, CheckpointTensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        held, said = read_header(file)
        for name in held.keys() & tensors.keys():
            raise UserError(
                f"{folder}: tensor {printable(name)} is in {tensors[name].file.name} and again in {file.name}; "
                "which of the two counts can't be known: remove one of the files, or the tensor from one"
            )
        tensors |= held
        metadata |= said
        if len(tensors) > MOST_TENSORS:
            raise UserError(too_many_tensors(folder))
    return tensors, metadata


class NoWeights(UserError):
    """Raised for a folder that has no weights in any known form."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights files of a folder, which together hold one model."""

    paths: tuple[Path, ...]
    read_by: WeightSet | None = None
    """The set of weights to which the files belong. None if libraries do not look for their names."""
    index: str | None = None
    """The name of the index that names the files, or None if there is none."""
    weight_map: Mapping[str, str] | None = None
    """The content of this index: the file name of each tensor."""
    unread: tuple[str, ...] = ()
    """Other weights in the folder, such as a second set, in words for the user."""


def find_weight_files(folder: Path, config: Mapping[str, Any] | None, absent_shards: bool = False) -> WeightFiles:
    """Return the weights files in a folder that transformers or diffusers would load. If no file has a name that they look for, the
    folder's only checkpoint file is returned. config: the content of config.json. absent_shards: whether to leave out missing files
    that an index names; at least one must exist.

    Raises UserError if the folder has several models and no library would choose one, or NoWeights if it has none.
    """
    names = _file_names(folder)
    if not (sets := weight_sets(names, config)):
        return WeightFiles(_only_files(folder, names))
    first = sets[0]
    variants = sorted({each.variant for each in sets if each.variant is not None})
    if first.variant is not None and len(variants) > 1:
        raise UserError(
            f"{folder} has its weights in the variants {', '.join(map(printable, variants))} and in none without a name; "
            f"move one of them into a folder of its own, with the files beside it"
        )
    path = resolve_inside(folder, first.name, "config.json")
    if first.has_index:
        weight_map = read_index(path)
        shards = list(dict.fromkeys(weight_map.values()))
        if absent_shards:  # names that are none of files here are refused below
            shards = [name for name in shards if not _is_plain_name(name) or os.path.exists(folder / name)] or shards
        paths = tuple(resolve_inside(folder, name, first.name) for name in shards)
        unread = unread_weights(names, {each.name for each in paths}, sets)
        return WeightFiles(paths, first, first.name, weight_map, unread)
    of_file = {other: listed for other in sets[1:] if (listed := _index_of_file(folder, other, first)) is not None}
    unread = unread_weights(names, {path.name}, [each for each in sets if each not in of_file])
    index, listed = next(((other.name, listed) for other, listed in of_file.items()), (None, None))
    return WeightFiles((path,), first, index, listed, unread)


def _index_of_file(folder: Path, index: WeightSet, single: WeightSet) -> dict[str, str] | None:
    """Return the content of the file `index` if it names only the safetensors file `single`, as MLX's do. Otherwise None."""
    if not index.has_index or index.pickled or single.pickled:
        return None
    try:
        weight_map = read_index(resolve_inside(folder, index.name))
    except UserError:
        return None
    return weight_map if set(weight_map.values()) == {single.name} else None


def set_to_read(folder: Path, config: Mapping[str, Any] | None) -> WeightSet | None:
    """Return the set of weights that `find_weight_files` would read, or None if there is none. No index is opened."""
    return next(iter(weight_sets(_file_names(folder), config)), None)


def described_by(path: Path) -> Path:
    """Return the file that says what weights a model has, which need not be there: `path` itself if it is a file, or else the
    folder's index, its configuration or any other file.
    """
    if path.is_file():
        return path
    names = _file_names(path)
    indexes = [name for name in names if name.endswith(".index.json")]
    known = [name for name in (*indexes, PIPELINE_INDEX, "config.json", ADAPTER_CONFIG) if name in names]
    return path / next(iter((*known, *names)), "config.json")


def _file_names(folder: Path) -> list[str]:
    with reading(folder):
        return sorted(entry.name for entry in folder.iterdir() if entry.is_file())


def _only_files(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    for suffixes, what in (
        ((".safetensors",), "safetensors files"),
        (PICKLES, "PyTorch files"),
        ((".gguf",), "GGUF files"),
    ):
        loose = [name for name in names if name.endswith(suffixes) and name not in _NOT_WEIGHTS]
        if len(loose) == 1:
            return (resolve_inside(folder, loose[0]),)
        if loose and set(loose) <= set(gguf_parts(loose[0])):  # what reads them names the parts that are missing
            return tuple(resolve_inside(folder, name) for name in loose)
        if loose:
            raise UserError(
                f"{folder} has {len(loose)} {what} and no index; name one of them, such as {printable(loose[0])}"
            )
    raise NoWeights(f"{folder} is no model: it has neither {SINGLE} nor {INDEX}, and no other checkpoint")


_GGUF_PART = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def gguf_parts(name: str) -> list[str]:
    """Return the names of all parts of a GGUF model in order, given one such as `model-00001-of-00003.gguf`, [] for other names."""
    match = _GGUF_PART.fullmatch(name)
    if match is None:
        return []
    count = int(match["count"])
    names = [f"{match['name']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    return names if name in names else []


_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "rng_state.pth")


def read_index(index: Path) -> dict[str, str]:
    """Return an index as a mapping from tensor names to file names. Raises UserError if the file is not an index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or set(map(type, weight_map.values())) != {str}:
        raise UserError(f"{index}: it has no 'weight_map' of tensor names to files")
    return weight_map


def _is_plain_name(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not {"/", "\\", "\0"}.intersection(name)


def resolve_inside(folder: Path, name: str, index: str = INDEX) -> Path:
    """Return the path of the file `name` in a folder. The name comes from the file `index`, which is not trusted. Raises UserError
    if the file is missing, or if the name or a link leads out of the folder. Links to the `blobs` folder of the Hugging Face cache
    are allowed: its snapshots consist of them.
    """
    if not _is_plain_name(name):
        raise UserError(f"{folder / index}: {printable(name)!r} is not the name of a file in this folder")
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        raise UserError(
            f"shard {printable(name)} is missing in {folder}; fetch it again or name a complete folder"
        ) from None
    except (OSError, RuntimeError, ValueError):
        raise UserError(f"can't follow {printable(str(path), 500)}: it is a link that leads nowhere") from None
    if not _is_inside(folder, real):
        raise UserError(f"{path} is a link out of its folder, which a checkpoint may not have")
    return path


def _is_inside(folder: Path, real: Path) -> bool:
    root = folder.resolve()
    allowed = [root, *(parent.parent / "blobs" for parent in (root, *root.parents) if parent.name == "snapshots")]
    return any(real.is_relative_to(place) for place in allowed)


def refuse_link_out(folder: Path, name: str) -> None:
    """Raise UserError if the entry `name` of a folder is a link out of the folder to something that exists."""
    if (folder / name).is_symlink() and (folder / name).exists():
        resolve_inside(folder, name)


def refuse_links_out(folder: Path) -> None:
    """Raise UserError if a library that loads a tokenizer, a processor or a scheduler could open a file outside the folder, whose
    text would become part of a result: by a link, or because the settings name it. Since the names of files differ from class to
    class, all are checked except for kinds that no such library reads, and weights, which are checked where they are found.
    """
    with reading(folder):
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    for name in names:
        if (folder / name).is_dir():
            if _OPENED_FOLDERS.search(name):
                refuse_link_out(folder, name)
                refuse_links_out(folder / name)
        elif not name.lower().endswith(_NEVER_OPENED):
            refuse_link_out(folder, name)
            if name in SETTINGS:
                _refuse_named_out(folder / name)


def _refuse_named_out(path: Path) -> None:
    try:
        content = read_json(path)
    except UserError:
        return  # the library that reads it has the same problem
    for key, named in named_files(content, path.parent):
        if not _is_inside(path.parent, named.resolve()):
            raise UserError(
                f"{path}: {printable(key)} names {printable(str(named), 200)}, which is outside its folder; remove this entry"
            )


def read_beside(path: Path, most: int) -> bytes:
    """Return a file's content. Raises UserError if the file is not regular, has over `most` bytes or is a link out of its folder.
    Raises OSError if it can't be read.
    """
    refuse_link_out(path.parent, path.name)
    return read_regular(path, most)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError if there is none, or if the file is a link out of its folder."""
    try:
        with reading(path):
            data = json.loads(read_beside(path, LARGEST_JSON).decode())
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a JSON object")
    return data


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's config.json, or None if there is none. Raises UserError if it can't be read."""
    path = folder / "config.json"
    return read_json(path) if path.exists() else None
