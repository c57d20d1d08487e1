"""Counts the values that casts would make infinite or zero in a checkpoint's tensors, without loading a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.measure.planned_casts import casts_in_files
from dtype_engine.runtime.numerics.overflow_underflow import Counted, count_losses

if TYPE_CHECKING:
    from dtype_engine.checkpoint import Checkpoint
    from dtype_engine.core.tree import Tree


def losses_in_files(
    checkpoint: Checkpoint,
    tree: Tree,
    planned: Mapping[str, str],
    counted: Counted | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: IsCancelled = never,
) -> tuple[ValueLoss, ...]:
    """Count the values that casts make infinite or zero, or that saturate. The result has an entry for each tensor with such
    values, in the order of the tree. Tensors are read from the files one at a time.

    planned: the dtype to which each tensor is cast, by name. counted: a cache of earlier results, to which new results are added.
    If the files store a tensor of the model in several pieces, each piece has its own entry, under its name in the files.
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
