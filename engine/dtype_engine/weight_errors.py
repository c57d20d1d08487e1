"""Round-trip errors of a whole checkpoint under a plan, tensor by tensor, straight from its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from .checkpoint import Checkpoint, Watch, refuse_changed
from .errors import Cancelled, UserError
from .model.mapped import read_tensor
from .readings import SkippedTensor, WeightError, WeightReading
from .text import printable
from .tree import Tree
from .weights import exponents, round_trip


def round_trips(
    checkpoint: Checkpoint,
    tree: Tree,
    planned: Mapping[str, str],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[WeightError]:
    """The error of every tensor that the plan changes, in the tree's order. `on_progress` hears (tensors done, of how many).

    Raises UserError for a file that can't be read or was changed meanwhile, Cancelled.
    """
    watch = Watch(checkpoint.identities)
    changed = [tensor for tensor in tree.order if planned[tensor.name] != tensor.dtype]
    for done, tensor in enumerate(changed):
        if cancelled():
            raise Cancelled
        on_progress(done, len(changed))
        watch.look()
        found = round_trip(tensor.name, read_tensor(checkpoint, tensor.name), planned[tensor.name], cancelled)
        yield dataclasses.replace(found, stored=tensor.dtype)
    refuse_changed(checkpoint.identities)


def skipped(tree: Tree) -> list[SkippedTensor]:
    """The tensors that no cast is ever tried on, in the tree's order, and why."""
    return [
        SkippedTensor(tensor.name, tensor.dtype, tensor.fixed or f"is stored as {tensor.dtype}, which is never cast")
        for tensor in tree.order
        if not tensor.castable and tensor.persistent
    ]


def look_at(
    checkpoint: Checkpoint, name: str, targets: tuple[str, ...], cancelled: Callable[[], bool] = lambda: False
) -> WeightReading:
    """One tensor: its exponents, and its error in every dtype of `targets`. Raises UserError, Cancelled."""
    if name not in checkpoint.weights:
        raise UserError(f"{printable(name)} is not in the checkpoint's files: the model made it when it was loaded")
    refuse_changed(checkpoint.identities)
    stored = checkpoint.dtype(name)
    tensor = read_tensor(checkpoint, name)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise UserError(f"{printable(name)} is stored as {stored}, which is never cast")
    errors = tuple(
        dataclasses.replace(round_trip(name, tensor, target, cancelled), stored=stored)
        for target in targets
        if target != stored
    )
    return WeightReading(exponents(name, tensor, cancelled), errors)
