"""Finds where dtypes change silently: lists the implicit casts of one forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from dtype_engine.results.drift import ImplicitCastStats
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.modes.autocast import AutocastCastRecorder
from dtype_engine.runtime.modes.promotion import ImplicitCast
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.passes.one_pass import PassOptions
from dtype_engine.runtime.passes.runner import ForwardRunner


def implicit_casts(runner: ForwardRunner, batch: Batch) -> tuple[ImplicitCastStats, ...]:
    """Run the candidate on one batch, and return the casts that happen in its pass without being in the model's code, combined by
    `aggregate`. torch makes some of them. This program makes the others, where torch would raise an error because dtypes differ.

    Raises NoForward, KernelError, Cancelled.
    """
    casts: list[ImplicitCast] = []

    def recording(mode: WeightMode) -> AbstractContextManager[object]:
        mode.record = casts.append
        return AutocastCastRecorder(mode) if runner.settings.autocast else nullcontext()

    runner.candidate(runner.candidate_call(batch), PassOptions(around=recording))
    return aggregate(casts)


def aggregate(casts: Iterable[ImplicitCast]) -> tuple[ImplicitCastStats, ...]:
    """Combine casts with the same module, operation and dtypes into one entry. Casts to float64 come first, then those with the
    most elements; entries with equally many keep the order of the pass.

    Casts to float64 are rarely intended: a single float64 input or weight silently widens all later operations.
    """
    sums: dict[tuple[str, str, str, str, bool], tuple[int, int]] = {}
    for cast in casts:
        key = (cast.module, cast.operation, cast.source, cast.target, cast.torch_raises)
        elements, count = sums.get(key, (0, 0))
        sums[key] = (elements + cast.elements, count + 1)
    rows = [
        ImplicitCastStats(module, operation, source, target, elements, count, raises)
        for (module, operation, source, target, raises), (elements, count) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.target != "float64", -row.elements)))
