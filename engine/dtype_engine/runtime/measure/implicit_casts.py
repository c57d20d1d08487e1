"""Finds where dtypes change silently: lists the implicit casts of one forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dtype_engine.results.drift import ImplicitCastStats
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.libraries.torch_private import TO_COPY, TorchDispatchMode
from dtype_engine.runtime.modes.op_tables import Arguments
from dtype_engine.runtime.modes.promotion import ImplicitCast, cast_of
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.passes.one_pass import PassOptions
from dtype_engine.runtime.passes.runner import ForwardRunner


def implicit_casts(runner: ForwardRunner, batch: Batch) -> tuple[ImplicitCastStats, ...]:
    """Run the candidate on one batch, and return the casts in its pass that the model's code does not request, combined by
    `aggregate`. torch makes some of these casts. This program makes the others, where torch would raise an error because dtypes
    differ. Raises NoForward, KernelError, Cancelled.
    """
    casts: list[ImplicitCast] = []

    def recording(mode: WeightMode) -> AbstractContextManager[object]:
        mode.record = casts.append
        return _AutocastCastRecorder(mode) if runner.settings.autocast else nullcontext()

    runner.candidate(runner.candidate_call(batch), PassOptions(around=recording))
    return aggregate(casts)


class _AutocastCastRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the casts that `torch.autocast` makes inside torch's operations, where a torch-function mode can't see them."""

    def __init__(self, mode: WeightMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mode, target = self.mode, kwargs.get("dtype")
        if func is TO_COPY and mode.operation and mode.record is not None and target is not None:
            source = args[0]
            if target != source.dtype and source.is_floating_point() and target.is_floating_point:
                mode.record(cast_of(source, target, mode.operation, mode, torch_raises=False))
        return func(*args, **kwargs)


def aggregate(casts: Iterable[ImplicitCast]) -> tuple[ImplicitCastStats, ...]:
    """Combine casts with the same module, operation and dtypes into one entry. Casts to float64 come first, because they are rarely
    intended: a single float64 input or weight silently widens all later operations. Then come the casts with the most elements;
    entries with equally many keep the order of the pass.
    """
    elements, counts = Counter[tuple[str, str, str, str, bool]](), Counter[tuple[str, str, str, str, bool]]()
    for cast in casts:
        key = (cast.module, cast.operation, cast.source, cast.target, cast.torch_raises)
        elements[key] += cast.elements
        counts[key] += 1
    rows = [ImplicitCastStats(*key[:4], elements[key], count, key[4]) for key, count in counts.items()]
    return tuple(sorted(rows, key=lambda row: (row.target != "float64", -row.elements)))
