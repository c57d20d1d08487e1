"""The weights that a plan casts, with the sources of their stored values: those of a checkpoint's files or of an open model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.tree import TensorInfo
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.weights.checkpoint_weights import source_of
from dtype_engine.runtime.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class PlannedCast:
    """A weight that a plan casts."""

    name: str
    """The weight's name in the model. If the files store a tensor of the model in several pieces, each has an entry, under its name
    in the files.
    """
    stored: str
    """The stored dtype."""
    dtype: str
    """The dtype to which the plan casts the weight."""
    source: WeightSource


def casts_in_files(
    checkpoint: Checkpoint, tensors: Iterable[TensorInfo], planned: Mapping[str, str]
) -> list[PlannedCast]:
    """Return the weights of a checkpoint that a plan casts, in the order of `tensors`. Those that the files lack are left out.

    tensors: the tensors of the tree. planned: the dtype of each tensor, by name.
    """
    return [
        PlannedCast(
            tensor.name if len(names) == 1 else name,
            checkpoint.dtype(name),
            planned[tensor.name],
            source_of(checkpoint, name),
        )
        for tensor in tensors
        if planned[tensor.name] != tensor.dtype
        for names in [checkpoint.names_of(tensor)]
        for name in names
    ]


def casts_of_model(model: LiveModel, planned: Mapping[str, str]) -> list[PlannedCast]:
    """Return the weights of an open model that a plan casts. planned: the dtype of each weight, by name."""
    return [
        PlannedCast(name, weight.info.dtype, planned[name], weight.stored)
        for name, weight in model.weights.items()
        if planned[name] != weight.info.dtype
    ]
