"""The layout of an export: its folders and files. It is the layout of the source, so that the same loaders read the export.

A model has its weights in the top folder. A diffusers pipeline has a folder for each component and a `model_index.json` that names
the components. A PEFT adapter has `adapter_config.json` and one weights file. Files without weights (schedulers, tokenizers,
configurations) are copied unchanged. A notice lists the files that are not copied.
"""

from __future__ import annotations

import filecmp
import fnmatch
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dtype_engine.checkpoint import PICKLES, Checkpoint, read_json, resolve_inside
from dtype_engine.checkpoint.components import Component, component_names
from dtype_engine.checkpoint.weight_files import ADAPTER_CONFIG, PIPELINE_INDEX
from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import reading
from dtype_engine.core.text import printable
from dtype_engine.runtime.export.staging import ALONG

Kind = Literal["model", "component", "pipeline", "adapter"]
_WEIGHTS = (
    ".safetensors",
    *PICKLES,
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".msgpack",
    ".h5",
    ".ot",
    ".pb",
    ".xml",
    ".tflite",
)
_TOP = ("*.py", PIPELINE_INDEX, ADAPTER_CONFIG, *ALONG)
NAMES_DTYPE = frozenset({"model_type", "dtype", "torch_dtype"})
"""The entries of a component's config.json, any of which says that the loader takes the dtype from there."""
_OURS = ("README.md", "recipe.yaml")
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A folder of the export that holds weights."""

    folder: str = ""
    """The name of the folder in the export; "" for the top folder."""
    prefix: str = ""
    """The prefix of this folder's tensors in `Contents.items`, such as `unet.`. The names in the folder's files lack it."""
    stem: str = "model"
    """The name of the weights file without `.safetensors`."""
    one_file: bool = False
    """Whether all weights must be in a single file, because the loader of this folder does not support shards."""
    config: dict[str, Any] | None = None
    """The content of this folder's `config.json`, if the cast changes the dtype or the quantization that it names."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    loaded: str = ""
    """The dtype with which to load the model in this folder, if the folder has weights in torchao's layout."""

    def path(self, name: str) -> str:
        """Return the path of this folder's file `name` in the export."""
        return f"{self.folder}/{name}" if self.folder else name


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders and files of an export, and the kind of model that they hold."""

    kind: Kind = "model"
    """"model" for a transformers model or weights without a configuration, "pipeline" for a diffusers pipeline, "component" for a
    single diffusers model, "adapter" for a PEFT adapter.
    """
    parts: tuple[Part, ...] = (Part(),)
    copied: tuple[tuple[Path, str], ...] = ()
    """The files to copy unchanged: pairs (source file, path in the export)."""
    notices: tuple[str, ...] = ()
    class_name: str = ""
    """The diffusers class that the configuration of a pipeline or component names."""
    base: str = ""
    """The base model that the configuration of an adapter names."""

    def differences(self, folder: Path) -> Iterator[tuple[str, str]]:
        """Yield (path, what is wrong) for each copied file that is missing or different in the export `folder`."""
        for source, path in self.copied:
            try:
                if not filecmp.cmp(source, folder / path, shallow=False):
                    yield path, "is not the file of the source"
            except FileNotFoundError:
                yield path, "is missing"


PLAIN = Layout()


def layout_of(checkpoint: Checkpoint) -> Layout:
    """Return the layout for an export of this checkpoint. Raises UserError if a folder of the source can't be read."""
    if checkpoint.form == "diffusers":
        return _pipeline(checkpoint)
    config = checkpoint.config or {}
    is_adapter = checkpoint.form == "adapter"
    if not is_adapter and (not config.get("_class_name") or config.get("model_type")):
        return PLAIN if checkpoint.merged is None else Layout(copied=_of_adapter(checkpoint.merged.adapter))
    copy = _FolderCopy(checkpoint.folder)
    copy.top(("config.json", *_TOP))
    copied, notices = tuple(copy.copied), copy.notices()
    if is_adapter:
        part = Part(stem="adapter_model", one_file=True, metadata=checkpoint.metadata)
        return Layout("adapter", (part,), copied, notices, base=printable(checkpoint.base or "", 200))
    part = Part(stem="diffusion_pytorch_model", metadata=checkpoint.metadata)
    return Layout("component", (part,), copied, notices, _class_name(config, "ModelMixin"))


def _of_adapter(adapter: Checkpoint) -> tuple[tuple[Path, str], ...]:
    """Return the files of an adapter that an export of the merged model has instead of those of its base, such as the tokenizer."""
    copy = _FolderCopy(adapter.path)
    copy.top(tuple(pattern for pattern in ALONG if not pattern.endswith(".py")))
    return tuple(copy.copied)


def _pipeline(checkpoint: Checkpoint) -> Layout:
    index = read_json(checkpoint.path / PIPELINE_INDEX)
    copy = _FolderCopy(checkpoint.path)
    by_name = {component.name: component for component in checkpoint.components}
    names = component_names(index)
    copy.top(_TOP, folders=names)
    parts: list[Part] = []
    as_they_are: list[str] = []
    for name in names:
        component = by_name.get(name)
        if component is None or component.pickled:
            if copy.everything(name):
                as_they_are.append(name)
            continue
        # transformers loads a model in the dtype that its config.json names, so that has to change with the cast.
        named = NAMES_DTYPE.intersection(component.config or ())
        config = component.config if named else None
        copy.without_weights(component, with_config=config is None)
        parts.append(Part(name, component.prefix, component.stem, False, config, component.metadata))
    if as_they_are:
        copy.notes.append(
            f"copied as they are, since their weights are not in safetensors: {', '.join(map(printable, as_they_are))}"
        )
    class_name = _class_name(index, "DiffusionPipeline")
    return Layout("pipeline", tuple(parts), tuple(copy.copied), copy.notices(), class_name)


def _class_name(config: Mapping[str, Any], otherwise: str) -> str:
    """Return the diffusers class that a configuration names, or `otherwise` if it names no valid class name."""
    name = config.get("_class_name")
    return name if isinstance(name, str) and name.isidentifier() and name.isascii() and len(name) < 100 else otherwise


class _FolderCopy:
    """Collects the files that an export copies from a source folder, and writes notices about the files that it does not copy."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.copied: list[tuple[Path, str]] = []
        self.notes: list[str] = []
        self.other_weights: list[str] = []
        self.left_out: list[str] = []

    def top(self, patterns: tuple[str, ...], folders: tuple[str, ...] = ()) -> None:
        """Collect the files directly in the source folder whose names match `patterns`. Other entries are noted as left out,
        except weights, files that each export writes anew, and the folders of the pipeline's components (`folders`).
        """
        for entry in _entries(self.source):
            if entry.name in folders and entry.is_dir():
                continue
            if any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in patterns):
                self._take(self.source, entry, "")
            elif entry.name not in _OURS and not _is_weight(entry.name):
                self.left_out.append(entry.name)

    def everything(self, name: str) -> bool:
        """Collect all files of the folder of the component `name`. Returns whether any of them holds weights."""
        return any(_is_weight(path) for path in self._walk(self.source / name, f"{name}/", lambda name: True))

    def without_weights(self, component: Component, with_config: bool) -> None:
        """Collect those files of a component that hold no weights. with_config: whether to collect its `config.json`, too."""
        written = {file.name for file in component.files}
        self.other_weights += [
            f"{component.name}/{entry.name}"
            for entry in _entries(component.folder)
            if _is_weight(entry.name) and not entry.name.endswith(".json") and entry.name not in written
        ]
        if component.variant is not None:
            self.notes.append(
                f"{printable(component.name)}: written without the variant {printable(component.variant)} in the names of its "
                "files, which a cast makes untrue"
            )
        config = None if with_config else f"{component.name}/config.json"
        self._walk(component.folder, f"{component.name}/", lambda path: path != config and not _is_weight(path))

    def _walk(self, folder: Path, prefix: str, wanted: Callable[[str], bool]) -> list[str]:
        taken = []
        for entry in _entries(folder):
            if entry.is_dir() and not entry.is_symlink():
                taken += self._walk(entry, f"{prefix}{entry.name}/", wanted)
            elif wanted(prefix + entry.name) and self._take(folder, entry, prefix):
                taken.append(prefix + entry.name)
        return taken

    def _take(self, folder: Path, entry: Path, prefix: str) -> bool:
        try:
            real = resolve_inside(folder, entry.name).resolve(strict=True)
            if stat.S_ISREG(os.stat(real).st_mode):
                self.copied.append((real, prefix + entry.name))
                return True
            self.notes.append(f"not copied: {printable(prefix + entry.name, 200)} is no regular file")
        except UserError as error:
            self.notes.append(f"not copied: {error}")
        return False

    def notices(self) -> tuple[str, ...]:
        for names, why in (
            (self.other_weights, "left out, since they are other forms of the weights that are written"),
            (self.left_out, "left out, since they are not part of the model"),
        ):
            if names:
                shown = ", ".join(printable(name, 100) for name in names[:_MOST_NAMED])
                more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
                self.notes.append(f"{why}: {shown}{more}")
        return tuple(self.notes)


def _entries(folder: Path) -> list[Path]:
    """Return the sorted entries of a folder, except hidden ones. Raises UserError if the folder can't be read."""
    with reading(folder):
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _is_weight(name: str) -> bool:
    return name.endswith(_WEIGHTS) or (
        name.endswith(".json") and (".safetensors.index" in name or ".bin.index" in name)
    )
