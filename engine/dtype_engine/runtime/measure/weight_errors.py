"""Computes the round-trip errors of weights: how much casting them by a plan changes their values. No pass is run, so a dtype with
a rounding such as GPTQ, which is fitted to inputs, counts as the format with the nearest values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from dtype_engine.checkpoint import Checkpoint, FileIdentity, Watch, refuse_changed
from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.results.weights import SkippedTensor, WeightError, WeightStats
from dtype_engine.runtime.device import has_float64
from dtype_engine.runtime.measure.planned_casts import PlannedCast
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.candidate import candidate_value
from dtype_engine.runtime.numerics.compare.element_sums import element_sums
from dtype_engine.runtime.numerics.compare.metrics import sqnr_db
from dtype_engine.runtime.numerics.quantization_error import exponents, round_trip
from dtype_engine.runtime.weights.checkpoint_weights import source_of


def round_trips(
    casts: Sequence[PlannedCast],
    identities: Sequence[FileIdentity],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[WeightError]:
    """Yield the round-trip error (of casting and casting back) of every weight that a plan casts. identities: the identities of the
    files from which the weights are read. `on_progress(done, total)` is called with numbers of weights. Raises UserError if a file
    can't be read or has changed since it was opened.
    """
    watch = Watch(identities)
    for done, cast in enumerate(casts):
        on_progress(done, len(casts))
        watch.look()
        dtype = dtypes.unrounded(cast.dtype)
        yield dataclasses.replace(round_trip(cast.name, cast.source.read(), dtype), stored=cast.stored)
    refuse_changed(identities)


def skipped(tree: Tree) -> list[SkippedTensor]:
    """Return the tensors that can never be cast, with the reasons, in the order of the tree."""
    return [
        SkippedTensor(tensor.name, tensor.dtype, tensor.why_not_cast)
        for tensor in tree.order
        if not tensor.castable and tensor.persistent
    ]


def inspect_weight(
    of: Checkpoint | LiveModel, name: str, targets: tuple[str, ...], cancelled: IsCancelled = never
) -> WeightStats:
    """Return the histogram of exponents of a tensor of a checkpoint or of an open model (`of`), and the round-trip error of casting
    the tensor to each dtype of `targets`. The stored values are read from the checkpoint if it has the tensor in one piece. Raises
    UserError, Cancelled.
    """
    if isinstance(of, LiveModel):
        stats = _inspected(of, name, targets, cancelled)
        weight = of.weights.get(name)
        return stats if weight is None else dataclasses.replace(stats, reference=_from_reference(weight))
    if name not in of.weights:
        raise UserError(f"{printable(name)} is not in the checkpoint's files: the model created it during loading")
    refuse_changed(of.identities)
    return _reading(name, source_of(of, name).read(), of.dtype(name), targets, cancelled)


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
    """Compare each weight of a model, as it is currently cast, with the same weight of the checkpoint that is its reference, and
    yield the drift. Yields nothing if the model is its own reference. Raises Cancelled, between two weights.
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
        for target in dict.fromkeys(map(dtypes.unrounded, targets))
        if target != stored
    )
    return WeightStats(exponents(name, tensor, cancelled), errors)
