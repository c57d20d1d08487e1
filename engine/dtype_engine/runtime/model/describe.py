"""The model description that all commands share: one tree with module classes and tied weights, in the stored dtypes.

For most checkpoints, it is derived from the file headers and the architecture on the meta device. A Python source, or a pickle that
holds a whole module, has to be loaded first. If the architecture is unknown, the tree is derived from the files alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.source import Source
from dtype_engine.core.errors import NoForward
from dtype_engine.core.options import Options
from dtype_engine.core.tree import Tree
from dtype_engine.runtime.model.load import build_on_meta, load
from dtype_engine.runtime.model.module_tree import tree_of
from dtype_engine.runtime.model.name_mapping import Placement, map_names
from dtype_engine.runtime.model.stored_tree import stored_tree


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The tree of a model, and further known facts about the model."""

    tree: Tree
    kinds: dict[str, frozenset[str]]
    """The names of the base classes of each module class in the tree."""
    model_type: str | None
    """The `model_type` in `config.json`."""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """The tensor in the tree for each tensor of the files. A tensor without an entry has the same name in both."""


def describe(source: Source, options: Options, checkpoint: Checkpoint | None = None) -> ModelDescription:
    """Describe a model. If its architecture is unknown, the description has no module classes.

    checkpoint: the headers of `source`, if they were read before. Raises UserError.
    """
    options = dataclasses.replace(options, device="cpu")
    if checkpoint is None:
        checkpoint = source.open()
    if checkpoint is None:
        module = load(source, options).module
        return ModelDescription(tree_of(module), _kinds(module), None)
    model_type = (checkpoint.config or {}).get("model_type")
    named = model_type if isinstance(model_type, str) else None
    if (made := build_on_meta(checkpoint, options)) is not None:
        module_without_data, placements = made
        tree = stored_tree(module_without_data, checkpoint, placements)
        return ModelDescription(tree, _kinds(module_without_data), named, placements)
    try:
        live = load(source, options)
    except NoForward:
        alone = {name: Placement(name, False) for name in checkpoint.weights}
        return ModelDescription(checkpoint.tree(), {}, named, alone)
    return ModelDescription(live.tree, _kinds(live.module), named, map_names(live.module, checkpoint.weights))


def _kinds(module: nn.Module) -> dict[str, frozenset[str]]:
    classes = {type(child) for child in module.modules()}
    return {
        module_class.__name__: frozenset(
            base.__name__ for base in module_class.__mro__[1:] if issubclass(base, nn.Module) and base is not nn.Module
        )
        for module_class in classes
    }
