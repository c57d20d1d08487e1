"""Fills a module with the tensors of a checkpoint, and describes a module that was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.results.coverage import Coverage
from dtype_engine.runtime.model.module_tree import collect_tensors
from dtype_engine.runtime.model.name_mapping import Placement
from dtype_engine.runtime.weights.checkpoint_weights import read_stored
from dtype_engine.runtime.weights.coded import CodedSource
from dtype_engine.runtime.weights.source import CPU, WeightSource


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module loaded from a checkpoint, with every weight in its stored dtype."""

    module: nn.Module
    sources: Mapping[str, WeightSource] = field(default_factory=dict)
    """The source of each weight for which the module has a placeholder, keyed by its name in the module."""
    notices: tuple[str, ...] = ()
    placements: Mapping[str, Placement] = field(default_factory=dict)
    coverage: Coverage | None = None
    """Which tensors of the module the files have, or None for a module that `load_into` filled."""


def load_into(
    module: nn.Module, checkpoint: Checkpoint, placements: Mapping[str, Placement] = MappingProxyType({})
) -> Loaded:
    """Fill a given module with the tensors of a checkpoint, memory-mapped from the files and in their stored dtypes. A weight that
    is stored as codes gets a placeholder, and its source is in the result.

    placements: where tensors of the files are loaded; by default under their own names. Raises UserError unless the checkpoint and
    the module have tensors of the same names and shapes.
    """
    infos, tensors = collect_tensors(module)
    by_any_name = {name: info for info in infos for name in info.names if info.persistent}
    sources = {}
    filled = set()
    for name, stored in checkpoint.weights.items():
        info = by_any_name.get(placements[name].name if name in placements else name)
        if info is None or info.shape != stored.shape:
            problem = "is not in this model" if info is None else f"has the shape {list(info.shape)} in this model"
            raise UserError(f"{checkpoint.path}: tensor {printable(name)} {problem}")
        filled.add(info.name)
        if name in checkpoint.coded:
            source = sources[info.name] = CodedSource(checkpoint.coded[name], tensors[info.name].dtype)
            tensors[info.name].data = source.held(CPU)
        else:
            fill(tensors[info.name], read_stored(checkpoint, stored))
    if missing := [info.name for info in infos if info.persistent and info.name not in filled]:
        raise UserError(f"{checkpoint.path} lacks {len(missing)} tensors of this model, first {missing[0]}")
    return Loaded(module, sources)


def fill(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Replace the data of a module's tensor. If the new data are not floats, gradients are switched off, as torch requires."""
    if not data.is_floating_point():
        tensor.requires_grad_(False)
    tensor.data = data


def loading_dtype(checkpoint: Checkpoint) -> str:
    """Return the name of the widest float dtype that a checkpoint stores. Loading in this dtype rounds no value."""
    return dtypes.widest(checkpoint.dtype(name) for name in checkpoint.weights)
