"""Finds the weights files of a folder by the names that libraries give them. The content of an index file is untrusted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.safetensors_header import MOST_TENSORS, CheckpointTensor, read_header, too_many_tensors
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import read_regular, reading
from dtype_engine.core.text import printable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIPELINE_INDEX = "model_index.json"
"""The file in a diffusers pipeline that lists its components."""
PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pth.tar")
_INDEXES = (INDEX, "diffusion_pytorch_model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = (SINGLE, "diffusion_pytorch_model.safetensors", "adapter_model.safetensors", "pytorch_model.bin",
            "diffusion_pytorch_model.bin", "adapter_model.bin")  # fmt: skip
LARGEST_JSON = 100_000_000


def read_shards(folder: Path, files: Iterable[Path]) -> tuple[dict[str, CheckpointTensor], dict[str, str]]:
    """Return the tensors and the metadata of several safetensors files together, each by name.

    Raises UserError if a file can't be read, or if two files have tensors of the same name.
    """
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


def find_weight_files(folder: Path, weight_map: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Return a folder's weights files, which together hold one model. weight_map: the content of `index_of(folder)`, if there is
    such an index and it was read. Raises UserError if the folder has several models, or NoWeights if it has none.
    """
    if weight_map is not None:
        return _shards(folder, weight_map)
    for name in _INDEXES:
        if (folder / name).exists() and not (name != INDEX and (folder / SINGLE).exists()):
            return _shards(folder, read_index(folder / name), name)
    for name in _SINGLES:
        if (folder / name).exists():
            return (resolve_inside(folder, name),)
    with reading(folder):
        present = sorted(entry.name for entry in folder.iterdir())
    if (files := _variant_files(folder, present)) is not None:
        return files
    for suffixes, what in (
        ((".safetensors",), "safetensors files"),
        (PICKLES, "PyTorch files"),
        ((".gguf",), "GGUF files"),
    ):
        loose = [name for name in present if name.endswith(suffixes) and name not in _NOT_WEIGHTS]
        if len(loose) == 1:
            return (resolve_inside(folder, loose[0]),)
        if loose and loose == gguf_parts(loose[0]):
            return tuple(resolve_inside(folder, name) for name in loose)
        if loose:
            raise UserError(
                f"{folder} has {len(loose)} {what} and no index; name one of them, such as {printable(loose[0])}"
            )
    raise NoWeights(f"{folder} is no model: it has neither {SINGLE} nor {INDEX}, and no other checkpoint")


_GGUF_PART = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def gguf_parts(name: str) -> list[str]:
    """Return the names of all parts of a model in GGUF files, in order, if `name` is the name of one of them, such as
    `model-00001-of-00003.gguf`. Return [] for any other name.
    """
    match = _GGUF_PART.fullmatch(name)
    if match is None:
        return []
    count = int(match["count"])
    names = [f"{match['name']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    return names if name in names else []


_VARIANT_FILE = re.compile(
    r"(model|diffusion_pytorch_model)(\.safetensors\.index\.(?P<index>[\w-]+)\.json|\.(?P<single>\w+)\.safetensors)"
)


def _variant_files(folder: Path, present: Iterable[str]) -> tuple[Path, ...] | None:
    """Return the weights files of a variant, such as those that `save_pretrained(variant="fp16")` writes, or None if the folder has
    no variant. Raises UserError for several variants, because the folder does not say which one to open. present: the names of the
    files in the folder.
    """
    variants = {match["index"] or match["single"]: name for name in present if (match := _VARIANT_FILE.fullmatch(name))}
    if not variants:
        return None
    if len(variants) > 1:
        raise UserError(
            f"{folder} has its weights in the variants {', '.join(map(printable, sorted(variants)))} and in none without a name; "
            f"move one of them into a folder of its own, with the files beside it"
        )
    name = next(iter(variants.values()))
    if name.endswith(".json"):
        return _shards(folder, read_index(folder / name), name)
    return (resolve_inside(folder, name),)


_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "rng_state.pth")


def _shards(folder: Path, weight_map: Mapping[str, str], index: str = INDEX) -> tuple[Path, ...]:
    return tuple(resolve_inside(folder, name, index) for name in dict.fromkeys(weight_map.values()))


def index_of(folder: Path) -> Path | None:
    """Return the safetensors index that `find_weight_files` reads for a folder, or None if it reads none."""
    path = folder / INDEX
    return path if path.exists() else None


def read_index(index: Path) -> dict[str, str]:
    """Read an index, such as `model.safetensors.index.json`. Returns the name of the file that holds each tensor, by the tensor's
    name. Raises UserError if the file is not an index.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or set(map(type, weight_map.values())) != {str}:
        raise UserError(f"{index}: it has no 'weight_map' of tensor names to files")
    return weight_map


def resolve_inside(folder: Path, name: str, index: str = INDEX) -> Path:
    """Return the path of the file `name` in a folder. Raises UserError if the name or a link leads out of the folder, because the
    name comes from an untrusted index, the file `index`.

    Links to the `blobs` folder of the Hugging Face cache are allowed, because the cache's snapshots consist of such links.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise UserError(f"{folder / index}: {printable(name)!r} is not the name of a file in this folder")
    path = folder / name
    try:
        real = path.resolve(strict=True)
        root = folder.resolve()
    except FileNotFoundError:
        raise UserError(
            f"shard {printable(name)} is missing in {folder}; fetch it again or name a complete folder"
        ) from None
    except (OSError, RuntimeError, ValueError):
        raise UserError(f"can't follow {printable(str(path), 500)}: it is a link that leads nowhere") from None
    allowed = [root, *(parent.parent / "blobs" for parent in (root, *root.parents) if parent.name == "snapshots")]
    if not any(real.is_relative_to(place) for place in allowed):
        raise UserError(f"{path} is a link out of its folder, which a checkpoint may not have")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError, which names the file, if there is none."""
    try:
        with reading(path):
            data = json.loads(read_regular(path, LARGEST_JSON).decode())
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a JSON object")
    return data


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's config.json, or None if the folder has none. Raises UserError if the file can't be read.
    Raises UserError also if it is a link that leads out of the folder, because an export would copy the link's target.
    """
    name = "config.json"
    return read_json(resolve_inside(folder, name)) if (folder / name).exists() else None


def variant_of(name: str) -> str | None:
    """Return the variant in a weights file's name, or None if the name has none. It is `fp16` in `model.fp16.safetensors`,
    `model.fp16-00001-of-00002.safetensors` and, as older versions wrote it, `model-00001-of-00002.fp16.safetensors`.
    """
    parts = name.split(".")
    if len(parts) != 3 or parts[0].split("-")[0] not in ("model", "diffusion_pytorch_model"):
        return None
    return parts[1].split("-")[0] or None
