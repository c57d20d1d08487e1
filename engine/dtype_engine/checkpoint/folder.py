"""Checkpoints in all the forms that people have on disk: which files they are made of, and what their headers say.

A folder is, in this order: a diffusers pipeline (`model_index.json`), a PEFT adapter (`adapter_config.json`), a Hugging Face
model (safetensors before pickles, one file or shards with an index), or whatever single checkpoint lies in it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dtype_engine.checkpoint.components import (
    PIPELINE_INDEX,
    Component,
    need_tensors,
    pipeline_notices,
    read_components,
    variant_of,
)
from dtype_engine.checkpoint.cut_files import identified
from dtype_engine.checkpoint.file_identity import FileIdentity, refuse_changed
from dtype_engine.checkpoint.parameter_counts import parameters_meant
from dtype_engine.checkpoint.prequantized import quantized_parts
from dtype_engine.checkpoint.safetensors_header import (
    MOST_TENSORS,
    CheckpointTensor,
    read_header,
    too_many_tensors,
)
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import read_regular
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Kind, TensorInfo, Tree, from_tensors

Form = Literal["safetensors", "pickle", "gguf", "diffusers", "adapter"]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""What PEFT writes beside an adapter's weights."""
PICKLES = (".pth", ".pt", ".bin", ".ckpt")
_INDEXES = (INDEX, "diffusion_pytorch_model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = (SINGLE, "diffusion_pytorch_model.safetensors", "adapter_model.safetensors", "pytorch_model.bin",
            "diffusion_pytorch_model.bin", "adapter_model.bin")  # fmt: skip
SCALED_KEY = "dtype_engine.scaled."
"""In an exported file's metadata: this and a tensor's name, for its storage-only dtype."""
SCALE_SUFFIX = "_scale"
"""`weight_scale` goes with `weight`, as in compressed-tensors."""
OWN_SUFFIX = "_quantized"
"""`weight_quantized` is a scaled `weight` that compressed-tensors can't express. Under its own name, other loaders would take
the numbers for values without a word."""
_LARGEST_JSON = 100_000_000
_LONG_HEADERS = 1_000_000
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

    form: which reader its files need. values: the tensors themselves where reading the headers already mapped them
    (pickles). base: the model that an adapter was made for. notices: what a user should know, a sentence each. identities: the
    files with weights as they were before anything of them was read. components: the folders of a diffusers pipeline that have
    weights. aliases: names that stand for the very same tensor as another, and that other's name (tied weights of a pickle, or
    of a file written by safetensors' `save_model`).
    """

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, CheckpointTensor]
    config: dict[str, Any] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    form: Form = "safetensors"
    values: Mapping[str, Any] | None = None
    base: str | None = None
    notices: tuple[str, ...] = ()
    identities: tuple[FileIdentity, ...] = ()
    components: tuple[Component, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

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
                and dtype in dtypes.STORAGE_DTYPES
                and data.dtype == dtypes.BY_NAME[dtype].torch_name
                and scale.dtype == "float32"
                and scale.nbytes == 4 * dtypes.scale_count(data.shape, dtype)
            )
            if data is None or scale is None or not whole:
                raise UserError(
                    f"{self.path}: the tensors of {printable(name)} are not those of a weight in {printable(dtype)} with its scales"
                )
            found[name] = Scaled(dtype, data, scale)
        return found | {alias: found[first] for alias, first in self.aliases.items() if first in found}

    @cached_property
    def weights(self) -> dict[str, CheckpointTensor]:
        """The tensors by the names that the model has for them, tied ones under each of theirs. Scales are left out, as they
        belong to their weight.
        """
        own = {tensor.data.name: name for name, tensor in self.scaled.items() if name not in self.aliases}
        scales = {tensor.scale.name for tensor in self.scaled.values()}
        found = {own.get(name, name): tensor for name, tensor in self.tensors.items() if name not in scales}
        return found | {alias: found[first] for alias, first in self.aliases.items()}

    def dtype(self, name: str) -> str:
        """The dtype of one of `weights`: a name of `dtypes`, `@tensor` included."""
        scaled = self.scaled.get(name)
        return scaled.dtype if scaled is not None else self.weights[name].dtype

    def tree(self) -> Tree:
        """The tree of its tensor names. Module classes are not known from headers, ties only where a pickle has one storage
        under several names.
        """
        fixed = quantized_parts(self.tensors.keys() - self._own_parts, self.config)
        further: dict[str, tuple[str, ...]] = {}
        for alias, first in self.aliases.items():
            further[first] = (*further.get(first, ()), alias)
        meant = parameters_meant(self.tensors, fixed, self.config)
        with _without_collecting():
            return from_tensors(
                TensorInfo(
                    name,
                    tensor.shape,
                    self.dtype(name),
                    _kind(name),
                    further.get(name, ()),
                    packed_bytes=tensor.nbytes if tensor.packed or tensor.refusal is not None else None,
                    fixed=tensor.refusal or fixed.get(name),
                    scaled=name in self.scaled,
                    meant=meant.get(name),
                )
                for name, tensor in self.weights.items()
                if name not in self.aliases
            )

    @property
    def _own_parts(self) -> set[str]:
        """Names of the data and the scales of `scaled`, as the files have them."""
        return {part.name for tensor in self.scaled.values() for part in (tensor.data, tensor.scale)}

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors, as stored, tied ones once."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if name not in self.aliases)


def _kind(name: str) -> Kind:
    return "buffer" if name.endswith(_BUFFERS) else "parameter"


def open_checkpoint(path: Path, trust_pickle: bool = False) -> Checkpoint:
    """Read the headers of a checkpoint folder or file.

    Of safetensors and GGUF files nothing but headers is read, of pickles nothing that could run code; they need torch.
    Raises UserError: what is wrong, in which file.
    """
    with _without_collecting():
        found = _open_folder(path, trust_pickle) if path.is_dir() else _open_file(path, trust_pickle)
    refuse_changed(found.identities)
    return found


def needs_torch(path: Path) -> bool:
    """Whether the names in a checkpoint can only be read with torch: it is a pickle."""
    if (path / INDEX).exists() or (path / SINGLE).exists():
        return False
    if path.is_dir():
        try:
            files = _weight_files(path)
        except UserError:
            return False
        return any(file.suffix in PICKLES for file in files)
    return path.suffix in PICKLES


def peek_first_shard(path: Path) -> Tree | None:
    """The tree of a large checkpoint's first shard, for a screen that can't wait for all the headers; None where all of
    them are read as quickly.
    """
    try:
        if not path.is_dir() or os.path.getsize(path / INDEX) < _LONG_HEADERS:
            return None
        first = min(entry.name for entry in os.scandir(path) if entry.name.endswith(".safetensors"))
        return Checkpoint(path, (), read_header(inside(path, first))[0]).tree()
    except (OSError, ValueError, UserError):
        return None


def _open_file(path: Path, trust_pickle: bool) -> Checkpoint:
    if path.suffix in PICKLES:
        return _of_pickles(path, (path,), None, trust_pickle)
    identities = identified((path,))
    if path.suffix == ".gguf":
        from dtype_engine.checkpoint.gguf import read_gguf

        tensors, metadata = read_gguf(path)
        return Checkpoint(path, (path,), tensors, None, metadata, "gguf", identities=identities)
    tensors, metadata = read_header(path)
    beside = path.parent / "config.json"
    config = read_json(beside) if path.name == SINGLE and beside.exists() else None
    aliases = _aliases(tensors, metadata)
    return Checkpoint(path, (path,), tensors, config, metadata, identities=identities, aliases=aliases)


def _open_folder(folder: Path, trust_pickle: bool) -> Checkpoint:
    if (folder / PIPELINE_INDEX).is_file():
        return _open_pipeline(folder)
    config_file = folder / "config.json"
    config = read_json(config_file) if config_file.exists() else None
    files = _weight_files(folder)
    adapter = (folder / ADAPTER_CONFIG).is_file() and (config is None or files[0].name.startswith("adapter_model."))
    if any(file.suffix in PICKLES for file in files):
        found = _of_pickles(folder, files, config, trust_pickle)
        return _as_adapter(found) if adapter else found
    if files[0].suffix == ".gguf":
        return _open_file(files[0], trust_pickle)
    identities = identified(files)
    tensors, metadata = _of_shards(folder, files)
    variant = variant_of(files[0].name)
    notices = (f"read from the files of the variant {printable(variant)}, the only ones there are",) if variant else ()
    found = Checkpoint(
        folder,
        files,
        tensors,
        config,
        metadata,
        notices=notices,
        identities=identities,
        aliases=_aliases(tensors, metadata),
    )
    return _as_adapter(found) if adapter else found


def _as_adapter(found: Checkpoint) -> Checkpoint:
    """The same checkpoint as a PEFT adapter: its tensors belong into those of another model."""
    base = str(read_json(found.path / ADAPTER_CONFIG).get("base_model_name_or_path") or "an unnamed model")
    notice = f"a PEFT adapter for {printable(base, 200)}: these are its own tensors, the base model is not among them"
    return dataclasses.replace(found, config=None, form="adapter", base=base, notices=(*found.notices, notice))


def _aliases(tensors: Mapping[str, CheckpointTensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """The names that a file has in its metadata alone, and the tensor's that each of them stands for.

    safetensors' `save_model` writes a tied weight once, and into the metadata each name that it left out and the one it kept.
    """
    return {
        name: kept
        for name, kept in metadata.items()
        if (kept in tensors or SCALED_KEY + kept in metadata)
        and not (not name or name == "format" or name in tensors or name.startswith(SCALED_KEY))
    }


def _of_shards(folder: Path, files: Iterable[Path]) -> tuple[dict[str, CheckpointTensor], dict[str, str]]:
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
        if len(tensors) > MOST_TENSORS:
            raise UserError(too_many_tensors(folder))
    return tensors, metadata


def _of_pickles(path: Path, files: tuple[Path, ...], config: dict[str, Any] | None, trust_pickle: bool) -> Checkpoint:
    from dtype_engine.checkpoint.pickles import read_pickles

    identities = identified(files)
    found = read_pickles(files, trust_pickle)
    return Checkpoint(
        path, files, found.tensors, config, form="pickle", values=found.values, notices=found.notices,
        identities=identities, aliases=found.aliases,
    )  # fmt: skip


def _open_pipeline(folder: Path) -> Checkpoint:
    """A diffusers folder: the components that have weights are the top of the tree."""
    index = read_json(folder / PIPELINE_INDEX)
    components, tensors = read_components(folder, index)
    need_tensors(folder, tensors)
    shown = [component for component in components if not component.pickled]
    return Checkpoint(
        folder,
        tuple(file for component in shown for file in component.files),
        tensors,
        None,
        {"pipeline": str(index.get("_class_name", ""))},
        "diffusers",
        notices=pipeline_notices(components),
        identities=tuple(identity for component in shown for identity in component.identities),
        components=components,
    )


class NoWeights(UserError):
    """A folder has no weights in any form that is known."""


def _weight_files(folder: Path) -> tuple[Path, ...]:
    for name in _INDEXES:
        if (folder / name).exists() and not (name != INDEX and (folder / SINGLE).exists()):
            return _shards(folder, folder / name)
    for name in _SINGLES:
        if (folder / name).exists():
            return (inside(folder, name),)
    try:
        present = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise UserError(f"can't read {folder}: {error.strerror}") from None
    if (files := _of_variant(folder, present)) is not None:
        return files
    for suffixes, what in (
        ((".safetensors",), "safetensors files"),
        (PICKLES, "PyTorch files"),
        ((".gguf",), "GGUF files"),
    ):
        loose = [name for name in present if name.endswith(suffixes) and name not in _NOT_WEIGHTS]
        if len(loose) == 1:
            return (inside(folder, loose[0]),)
        if loose:
            raise UserError(
                f"{folder} has {len(loose)} {what} and no index; name one of them, such as {printable(loose[0])}"
            )
    raise NoWeights(f"{folder} is no model: it has neither {SINGLE} nor {INDEX}, and no other checkpoint")


_VARIANT_FILE = re.compile(
    r"(model|diffusion_pytorch_model)(\.safetensors\.index\.(?P<index>[\w-]+)\.json|\.(?P<single>\w+)\.safetensors)"
)


def _of_variant(folder: Path, present: Iterable[str]) -> tuple[Path, ...] | None:
    """The files of a variant, as `save_pretrained(variant="fp16")` names them; None where there is none. Several are refused:
    which one is meant can't be known.
    """
    found = {match["index"] or match["single"]: name for name in present if (match := _VARIANT_FILE.fullmatch(name))}
    if not found:
        return None
    if len(found) > 1:
        raise UserError(
            f"{folder} has its weights in the variants {', '.join(map(printable, sorted(found)))} and in none without a name; "
            f"move one of them into a folder of its own, with the files beside it"
        )
    name = next(iter(found.values()))
    return _shards(folder, folder / name) if name.endswith(".json") else (inside(folder, name),)


_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "rng_state.pth")


def _shards(folder: Path, index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise UserError(f"{index}: it has no 'weight_map' of tensor names to files")
    names = list(dict.fromkeys(weight_map.values()))
    return tuple(inside(folder, name, index.name) for name in names)


def inside(folder: Path, name: str, index: str = INDEX) -> Path:
    """The file of this name in the folder. An index is untrusted: it may not point anywhere else, by name or by link.

    The one exception is the Hugging Face cache, whose snapshots are links into the `blobs` beside them.
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
    """A JSON object in a file. Raises UserError that names the file."""
    try:
        data = json.loads(read_regular(path, _LARGEST_JSON).decode())
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a JSON object")
    return data


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Leave the garbage collector off: it would look through hundreds of thousands of new objects, again and again, to
    find that none is garbage, and double the time that 90 000 tensors take.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
