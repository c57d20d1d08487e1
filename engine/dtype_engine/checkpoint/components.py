"""Reads a diffusers pipeline: a folder with a subfolder for each component, such as the UNet, which `model_index.json` lists.

diffusers' `DiffusionPipeline.save_pretrained` writes this format: `{"_class_name": ..., "unet": ["diffusers",
"UNet2DConditionModel"], "scheduler": [...], "safety_checker": [null, null]}`. Each component with weights is a checkpoint of its
own. Its library (diffusers or transformers) determines the names of its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint.file_identity import FileIdentity
from dtype_engine.checkpoint.file_kind import kind_of
from dtype_engine.checkpoint.weight_files import (
    PIPELINE_INDEX,
    NoWeights,
    find_weight_files,
    read_config,
    read_json,
    read_shards,
    resolve_inside,
)
from dtype_engine.checkpoint.weight_sets import several_sets
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a diffusers pipeline that has weights: a subfolder of the pipeline, with its files."""

    name: str
    folder: Path
    files: tuple[Path, ...]
    stem: str
    """The name of the weights file without `.safetensors`, as the component's library expects it."""
    config: dict[str, Any] | None
    metadata: Mapping[str, str]
    pickled: bool = False
    """Whether the weights are in pickles. The tensors of such a component are not among those of the pipeline."""
    identities: tuple[FileIdentity, ...] = ()
    variant: str | None = None
    """The variant of the files, such as fp16, if the component has only files of a variant, otherwise None."""
    notices: tuple[str, ...] = ()
    """Sentences for the user about the component's files."""

    @property
    def prefix(self) -> str:
        """The prefix of the names of this component's tensors in the pipeline, such as `unet.`."""
        return f"{self.name}."


def index_around(folder: Path) -> Mapping[str, Any]:
    """Return the `model_index.json` of the pipeline that has a folder as a component, or {} if there is no such pipeline."""
    with suppress(UserError):
        index = read_json(folder.parent / PIPELINE_INDEX) if (folder.parent / PIPELINE_INDEX).is_file() else {}
        return index if folder.name in component_names(index) else {}
    return {}


def component_names(index: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the components in a `model_index.json`, without those that the pipeline lacks (`[null, null]`)."""
    return tuple(
        name
        for name, named in index.items()
        if not name.startswith("_") and isinstance(named, list) and any(part is not None for part in named)
    )


def read_components(
    folder: Path, index: Mapping[str, Any], absent_shards: bool = False
) -> tuple[tuple[Component, ...], dict[str, Any]]:
    """Return (the components that have weights, their tensors by names such as `unet.conv.weight`). Tensors in pickles are left
    out. index: the content of `model_index.json`. absent_shards: as in `find_weight_files`. Raises UserError.
    """
    components: list[Component] = []
    tensors: dict[str, Any] = {}
    for name in component_names(index):
        subfolder = folder / name
        if not subfolder.is_dir():
            continue
        resolve_inside(folder, name, PIPELINE_INDEX)
        config = read_config(subfolder) if (subfolder / "config.json").is_file() else None
        try:
            found = find_weight_files(subfolder, config, absent_shards)
        except NoWeights:
            continue
        files, variant = found.paths, found.read_by.variant if found.read_by is not None else None
        pickled = any(kind_of(file) == "pickle" for file in files)
        identities = tuple(map(FileIdentity.of, files))
        own, metadata = ({}, {}) if pickled else read_shards(subfolder, files)
        stem = "diffusion_pytorch_model" if files[0].name.startswith("diffusion_pytorch_model") else "model"
        notices = (several_sets(found.read_by, found.unread, config),) if found.read_by and found.unread else ()
        components.append(
            Component(name, subfolder, files, stem, config, metadata, pickled, identities, variant, notices)
        )
        tensors |= {f"{name}.{local}": replace(tensor, name=f"{name}.{local}") for local, tensor in own.items()}
    return tuple(components), tensors


def pipeline_notices(components: tuple[Component, ...]) -> tuple[str, ...]:
    """Return sentences for the user about components whose weights are pickles or a variant such as fp16, or that have several sets
    of weights.
    """
    notices = []
    if pickled := [component.name for component in components if component.pickled]:
        notices.append(f"not shown, since their weights are pickles: {', '.join(map(printable, pickled))}")
    for component in components:
        if component.variant is not None and not component.pickled:
            notices.append(
                f"{printable(component.name)}: read from its files of the variant {printable(component.variant)}, the only "
                "ones there are"
            )
        notices += [f"{printable(component.name)}: {notice}" for notice in component.notices]
    return tuple(notices)
