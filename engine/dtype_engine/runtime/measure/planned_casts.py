"""The weights that a plan casts, of a checkpoint's files or of an open model, and the values that casts lose in files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled
from dtype_engine.core.tree import TensorInfo, Tree
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.overflow_underflow import Counted, count_losses
from dtype_engine.runtime.weights.checkpoint_weights import source_of
from dtype_engine.runtime.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class PlannedCast:
    """A weight that a plan casts."""

    name: str
    """The weight's name in the model. If the files store it in several pieces, each piece is a cast under its name in the files."""
    stored: str
    """The stored dtype."""
    dtype: str
    """The dtype to which the plan casts the weight."""
    source: WeightSource


def casts_in_files(
    checkpoint: Checkpoint, tensors: Iterable[TensorInfo], planned: Mapping[str, str]
) -> list[PlannedCast]:
    """Return the casts that a plan makes of `tensors`, as far as the files have them. A tensor that the files store in several
    parts has one entry for each part. planned: the dtype of each tensor, by name.
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


def losses_in_files(
    checkpoint: Checkpoint,
    tree: Tree,
    planned: Mapping[str, str],
    counted: Counted | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: IsCancelled = never,
) -> tuple[ValueLoss, ...]:
    """Count the values that casts make infinite or zero, or saturate. Returns an entry for each of `casts_in_files` that has such
    values, in the order of the tree. Tensors are read from the files one at a time.

    planned: the dtype of each tensor, by name. counted: a cache of earlier results, to which new results are added.
    `on_progress(done, total)` is called with the numbers of finished tensors and of all tensors. Raises UserError if a file can't
    be read, and Cancelled.
    """
    counted = {} if counted is None else counted
    casts = casts_in_files(checkpoint, tree.tensors.values(), planned)
    losses = []
    for done, cast in enumerate(casts):
        key = cast.name, cast.dtype
        if key not in counted:
            if cancelled():
                raise Cancelled
            on_progress(done, len(casts))
            counted[key] = count_losses(cast.name, cast.source.read(), cast.dtype, cancelled=cancelled)
        loss = counted[key]
        if loss is not None:
            losses.append(loss)
    return tuple(losses)
