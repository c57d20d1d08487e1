"""A diffusers pipeline: a folder of folders, each a component, named by `model_index.json`.

The format is what diffusers' `DiffusionPipeline.save_pretrained` writes: `{"_class_name": ..., "unet": ["diffusers",
"UNet2DConditionModel"], "scheduler": [...], "safety_checker": [null, null]}`. Every component with weights is a checkpoint of
its own, in files that are named as its library (diffusers or transformers) names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.file_identity import FileIdentity
from dtype_engine.checkpoint.file_kind import kind_of
from dtype_engine.checkpoint.weight_files import (
    NoWeights,
    find_weight_files,
    read_json,
    read_shards,
    resolve_inside,
    variant_of,
)
from dtype_engine.core.text import printable

PIPELINE_INDEX = "model_index.json"


@dataclass(frozen=True, slots=True)
class Component:
    """One folder with weights of a pipeline."""

    name: str
    folder: Path
    files: tuple[Path, ...]
    stem: str
    """The name that its library gives to a file of weights, without `.safetensors`."""
    config: dict[str, Any] | None
    metadata: Mapping[str, str]
    pickled: bool = False
    """Whether its weights are pickles. Their tensors are then not among those of the pipeline."""
    identities: tuple[FileIdentity, ...] = ()

    @property
    def prefix(self) -> str:
        """The beginning of its tensors' names in the whole pipeline."""
        return f"{self.name}."


def component_names(index: Mapping[str, Any]) -> tuple[str, ...]:
    """The components that an index names. An optional component that was left out has no class there, and is not among them."""
    return tuple(
        name
        for name, named in index.items()
        if not name.startswith("_") and isinstance(named, list) and any(part is not None for part in named)
    )


def read_components(folder: Path, index: Mapping[str, Any]) -> tuple[tuple[Component, ...], dict[str, Any]]:
    """The components with weights in the order of the index, and the tensors of all that are not pickles, under names such as
    `unet.conv.weight`.

    Raises UserError for a component whose files are damaged, or that lies outside the folder.
    """
    components: list[Component] = []
    tensors: dict[str, Any] = {}
    for name in component_names(index):
        subfolder = folder / name
        if not subfolder.is_dir():
            continue
        resolve_inside(folder, name, PIPELINE_INDEX)
        try:
            files = find_weight_files(subfolder)
        except NoWeights:
            continue
        pickled = any(kind_of(file) == "pickle" for file in files)
        identities = tuple(map(FileIdentity.of, files))
        own, metadata = ({}, {}) if pickled else read_shards(subfolder, files)
        config = read_json(subfolder / "config.json") if (subfolder / "config.json").is_file() else None
        stem = "diffusion_pytorch_model" if files[0].name.startswith("diffusion_pytorch_model") else "model"
        components.append(Component(name, subfolder, files, stem, config, metadata, pickled, identities))
        tensors |= {f"{name}.{local}": tensor.renamed(f"{name}.{local}") for local, tensor in own.items()}
    return tuple(components), tensors


def pipeline_notices(components: tuple[Component, ...]) -> tuple[str, ...]:
    """What a user should know about the components that were read, a sentence each."""
    notices = []
    if pickled := [component.name for component in components if component.pickled]:
        notices.append(f"not shown, since their weights are pickles: {', '.join(map(printable, pickled))}")
    for component in components:
        variant = variant_of(component.files[0].name)
        if variant is not None and not component.pickled:
            notices.append(
                f"{printable(component.name)}: read from its files of the variant {printable(variant)}, the only ones there are"
            )
    return tuple(notices)
