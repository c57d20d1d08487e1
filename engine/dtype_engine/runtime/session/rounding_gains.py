"""Computes by how much roundings such as GPTQ would lower the errors of layers, without casting the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dtype_engine.core import dtypes
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.draft_heads import NOT_RUN, WORDS
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.results.rounding import WeightGain
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.scan.scanned_roundings import ScannedRoundings, gain_of


def rounding_gains(
    model: LiveModel,
    wanted: Mapping[str, Sequence[str]],
    on_progress: Callable[[int, int], object],
    cancelled: IsCancelled,
) -> tuple[WeightGain, ...]:
    """Return what a rounding gains for each matrix and each dtype that is wanted for it, as far as the dtype takes one: its own
    rounding, otherwise that of `dtypes.with_rounding`.

    wanted: the dtypes of weights, by the weights' names. on_progress: called with the numbers of finished steps and of all, which
    are calibration runs and roundings. Raises UserError for a name that is no weight, and if the model has no calibration inputs.
    Raises NoForward, KernelError, Cancelled.
    """
    if of_draft := [name for name in wanted if name in model.tree.of_draft]:
        raise UserError(f"{printable(of_draft[0])} is in the {WORDS}: {NOT_RUN}, so it keeps the nearest values")
    if unknown := [name for name in wanted if name not in model.weights]:
        raise UserError(f"the model has no weight {printable(unknown[0])}")
    rounded = {
        name: tuple(found for dtype in dict.fromkeys(those) if (found := dtypes.with_rounding(dtype)) is not None)
        for name, those in wanted.items()
        if len(model.weights[name].info.shape) > 1
    }
    made = ScannedRoundings(model, rounded, keeps=False)
    made.make(on_progress, cancelled)
    return tuple(
        WeightGain(name, dtype, gain_of(made.roundings, model.weights, name, dtype))
        for name, those in rounded.items()
        for dtype in those
    )
