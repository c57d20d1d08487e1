"""Computes the round-trip errors of a checkpoint's tensors: how much casting them by a plan changes their values. The tensors are
read from the files, without loading the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import torch

from dtype_engine.checkpoint import Checkpoint, Watch, refuse_changed
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.results.weights import SkippedTensor, WeightError, WeightStats
from dtype_engine.runtime.device import has_float64
from dtype_engine.runtime.model.live import LiveModel, Weight
from dtype_engine.runtime.modes.candidate import candidate_value
from dtype_engine.runtime.numerics.compare.element_sums import element_sums
from dtype_engine.runtime.numerics.compare.metrics import sqnr_db
from dtype_engine.runtime.numerics.quantization_error import exponents, round_trip
from dtype_engine.runtime.weights.checkpoint_weights import source_of


def round_trips(
    checkpoint: Checkpoint,
    tree: Tree,
    planned: Mapping[str, str],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[WeightError]:
    """Yield the round-trip error (of casting and casting back) of every tensor whose dtype the plan changes, in the order of the
    tree.

    planned: the dtype of each tensor, by name. If the files store a tensor of the model as several tensors, each of these has its
    own entry, under its name in the files. Tensors that are not in the files are omitted. `on_progress(done, total)` is called with
    the numbers of finished tensors and of all tensors. Raises UserError if a file can't be read or has changed since it was opened.
    """
    watch = Watch(checkpoint.identities)
    changed = [
        (tensor if len(names) == 1 else dataclasses.replace(tensor, name=name), name, planned[tensor.name])
        for tensor in tree.order
        if planned[tensor.name] != tensor.dtype
        for names in [checkpoint.names_of(tensor)]
        for name in names
    ]
    for done, (tensor, name, dtype) in enumerate(changed):
        on_progress(done, len(changed))
        watch.look()
        error = round_trip(tensor.name, source_of(checkpoint, name).read(), dtype)
        yield dataclasses.replace(error, stored=checkpoint.dtype(name))
    refuse_changed(checkpoint.identities)


def round_trips_of_live(
    model: LiveModel,
    planned: Mapping[str, str],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[WeightError]:
    """Yield the round-trip error (of casting and casting back) of every tensor whose dtype the plan changes in a live model, such
    as one built in Python. planned: the dtype of each tensor, by name. `on_progress(done, total)` is called with the numbers of
    finished tensors and of all tensors.
    """
    changed = [weight for name, weight in model.weights.items() if planned[name] != weight.info.dtype]
    for done, weight in enumerate(changed):
        on_progress(done, len(changed))
        yield round_trip(weight.info.name, weight.stored.read(), planned[weight.info.name])


def skipped(tree: Tree) -> list[SkippedTensor]:
    """Return the tensors that can never be cast, with the reasons, in the order of the tree."""
    return [
        SkippedTensor(tensor.name, tensor.dtype, tensor.why_not_cast)
        for tensor in tree.order
        if not tensor.castable and tensor.persistent
    ]


def inspect_weight(
    checkpoint: Checkpoint, name: str, targets: tuple[str, ...], cancelled: IsCancelled = never
) -> WeightStats:
    """Read a tensor from a checkpoint. Returns the histogram of its exponents, and the round-trip error of casting it to each dtype
    of `targets` and back. Raises UserError, Cancelled.
    """
    if name not in checkpoint.weights:
        raise UserError(f"{printable(name)} is not in the checkpoint's files: the model created it during loading")
    refuse_changed(checkpoint.identities)
    return _reading(name, source_of(checkpoint, name).read(), checkpoint.dtype(name), targets, cancelled)


def inspect_live_weight(
    model: LiveModel, name: str, targets: tuple[str, ...], cancelled: IsCancelled = never
) -> WeightStats:
    """Return the histogram of exponents of a tensor in an open model, and the round-trip error of casting it to each dtype of
    `targets` and back. The stored values are read from the checkpoint if it stores the tensor in one piece. Raises UserError,
    Cancelled.
    """
    weight = model.weights.get(name)
    stats = _inspected(model, name, targets, cancelled)
    return stats if weight is None else dataclasses.replace(stats, reference=_from_reference(weight))


def _inspected(model: LiveModel, name: str, targets: tuple[str, ...], cancelled: IsCancelled) -> WeightStats:
    info = model.tree.canonical(name)
    names = model.checkpoint.names_of(info) if model.checkpoint is not None and info is not None else ()
    if model.checkpoint is not None and len(names) == 1:
        return inspect_weight(model.checkpoint, names[0], targets, cancelled)
    weight = model.weights.get(name)
    if weight is None:
        raise UserError(f"the model has no tensor {printable(name)}")
    return _reading(name, weight.stored.read(), weight.info.dtype, targets, cancelled)


def reference_differences(model: LiveModel, cancelled: IsCancelled = never) -> Iterator[ModuleDrift]:
    """Compare each weight of a model, as it is currently cast, with the same weight of a different checkpoint that is the
    reference. Yields the difference of each. Yields nothing if the model itself is the reference. Raises Cancelled, between two
    weights.
    """
    for weight in model.weights.values():
        if cancelled():
            raise Cancelled
        if (found := _from_reference(weight)) is not None:
            yield found


def _from_reference(weight: Weight) -> ModuleDrift | None:
    if weight.other_reference is None:
        return None
    values = candidate_value(weight, torch.float32)
    values = values if has_float64(values.device) else values.cpu()
    sums = element_sums(weight.other_reference.read(values.device), values, parallel=True)
    return ModuleDrift(weight.info.name, sqnr_db(sums.energy, sums.noise), sums.max_abs, sums.nonfinite)


def _reading(
    name: str, tensor: torch.Tensor, stored: str, targets: tuple[str, ...], cancelled: IsCancelled
) -> WeightStats:
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise UserError(f"{printable(name)} is stored as {stored}, which is never cast")
    errors = tuple(
        dataclasses.replace(round_trip(name, tensor, target, cancelled), stored=stored)
        for target in targets
        if target != stored
    )
    return WeightStats(exponents(name, tensor, cancelled), errors)
