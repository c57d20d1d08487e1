"""A Hugging Face folder: `config.json`, and weights in one safetensors file or in shards with an index."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import dtypes
from ..errors import UserError
from ..text import printable
from ..tree import Kind, TensorInfo, Tree, from_tensors
from .safetensors_header import CheckpointTensor, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALED_KEY = "dtype_engine.scaled."
"""In an exported file's metadata: this and a tensor's name, for its storage-only dtype."""
SCALE_SUFFIX = "_scale"
"""`weight_scale` goes with `weight`, as in compressed-tensors."""
OWN_SUFFIX = "_quantized"
"""`weight_quantized` is a scaled `weight` that compressed-tensors can't express. Under its own name, other loaders would take
the numbers for values without a word."""
_LARGEST_JSON = 100_000_000
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Scaled:
    """A storage-only weight of an exported checkpoint: its dtype (`@tensor` included), its data and its float32 scales."""

    dtype: str
    data: CheckpointTensor
    scale: CheckpointTensor


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint's headers say: every tensor by name, in the files' order, and `config.json` where there is
    one.
    """

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, CheckpointTensor]
    config: dict[str, Any] | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    @cached_property
    def scaled(self) -> dict[str, Scaled]:
        """Tensors that an export of this program stored with scales, by the name that the model has for them.

        Raises UserError where the file's own account of them does not agree with its tensors.
        """
        found = {}
        for key, dtype in self.metadata.items():
            if not key.startswith(SCALED_KEY):
                continue
            name = key.removeprefix(SCALED_KEY)
            data = self.tensors.get(name) or self.tensors.get(name + OWN_SUFFIX)
            scale = self.tensors.get(name + SCALE_SUFFIX)
            whole = (
                data is not None
                and scale is not None
                and dtype in dtypes.STORAGE_ONLY
                and data.dtype == dtypes.BY_NAME[dtype].torch_name
                and scale.dtype == "float32"
                and scale.nbytes == 4 * dtypes.scale_count(data.shape, dtype)
            )
            if data is None or scale is None or not whole:
                raise UserError(
                    f"{self.path}: the tensors of {printable(name)} are not those of a weight in {printable(dtype)} with its scales"
                )
            found[name] = Scaled(dtype, data, scale)
        return found

    @cached_property
    def weights(self) -> dict[str, CheckpointTensor]:
        """The tensors by the names that the model has for them: scales are left out, as they belong to their weight."""
        own = {tensor.data.name: name for name, tensor in self.scaled.items()}
        scales = {tensor.scale.name for tensor in self.scaled.values()}
        return {own.get(name, name): tensor for name, tensor in self.tensors.items() if name not in scales}

    def dtype(self, name: str) -> str:
        """The dtype of one of `weights`: a name of `dtypes`, `@tensor` included."""
        scaled = self.scaled.get(name)
        return scaled.dtype if scaled is not None else self.weights[name].dtype

    def tree(self) -> Tree:
        """The tree of its tensor names; module classes and ties are not known from headers."""
        return from_tensors(
            TensorInfo(name, tensor.shape, self.dtype(name), _kind(name), scaled=name in self.scaled)
            for name, tensor in self.weights.items()
        )


def _kind(name: str) -> Kind:
    return "buffer" if name.endswith(_BUFFERS) else "parameter"


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a checkpoint folder or of one safetensors file.

    Nothing but headers, the index and `config.json` is read. Raises UserError: what is wrong, in which file.
    """
    if path.is_dir():
        return _open_folder(path)
    tensors, metadata = read_header(path)
    beside = path.parent / "config.json"
    config = read_json(beside) if path.name == SINGLE and beside.exists() else None
    return Checkpoint(path, (path,), tensors, config, metadata)


def _open_folder(folder: Path) -> Checkpoint:
    files = _weight_files(folder)
    tensors: dict[str, CheckpointTensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        found, said = read_header(file)
        for name in found.keys() & tensors.keys():
            raise UserError(
                f"{folder}: tensor {printable(name)} is in {tensors[name].file.name} and again in {file.name}"
            )
        tensors |= found
        metadata |= said
    config_file = folder / "config.json"
    return Checkpoint(folder, files, tensors, read_json(config_file) if config_file.exists() else None, metadata)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX
    if index.exists():
        return _shards(folder, index)
    if (folder / SINGLE).exists():
        return (inside(folder, SINGLE),)
    try:
        present = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise UserError(f"can't read {folder}: {error.strerror}") from None
    loose = [name for name in present if name.endswith(".safetensors")]
    if len(loose) == 1:
        return (inside(folder, loose[0]),)
    if loose:
        raise UserError(f"{folder} has {len(loose)} safetensors files and no {INDEX}; name one of them")
    pickles = [name for name in present if name.endswith((".bin", ".pth", ".pt", ".ckpt"))]
    if pickles:
        raise UserError(
            f"{folder} holds its weights as {printable(pickles[0])}, a PyTorch pickle; convert it to safetensors first"
        )
    raise UserError(f"{folder} is no model: it has neither {SINGLE} nor {INDEX}")


def _shards(folder: Path, index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise UserError(f"{index}: it has no 'weight_map' of tensor names to files")
    names = list(dict.fromkeys(weight_map.values()))
    return tuple(inside(folder, name) for name in names)


def inside(folder: Path, name: str) -> Path:
    """The file of this name in the folder. An index is untrusted: it may not point anywhere else, by name or by link.

    The one exception is the Hugging Face cache, whose snapshots are links into the `blobs` beside them.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise UserError(f"{folder / INDEX}: {printable(name)!r} is not the name of a file in this folder")
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        raise UserError(
            f"shard {printable(name)} is missing in {folder}; fetch it again or name a complete folder"
        ) from None
    except (OSError, RuntimeError):
        raise UserError(f"can't follow {path}: it is a link that leads nowhere") from None
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed.append(folder.resolve().parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in allowed):
        raise UserError(f"{path} is a link out of its folder, which a checkpoint may not have")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Raises UserError that names the file."""
    try:
        if os.path.getsize(path) > _LARGEST_JSON:
            raise UserError(f"{path}: over {_LARGEST_JSON} bytes are too many for this file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a JSON object")
    return data
