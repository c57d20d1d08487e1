"""Times forward passes of three variants of the model: in the reference's dtype, as stored, and as currently cast."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.options import RunSettings
from dtype_engine.core.system_memory import free_memory
from dtype_engine.recipe import Plan, tensor_bytes
from dtype_engine.results.runs import SpeedReport, SpeedRow
from dtype_engine.runtime.device import free_bytes
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.measure.progress import part_of
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.runner import ForwardRunner

REPEATS = 5
_LONG_ENOUGH_S = 30.0
OnPasses = Callable[[str, int, int], None]
"""A callback `on_passes(variant, done, total)` with the variant of the model that is being timed, such as "as stored", and the
number of finished and of all planned passes. If a variant needs fewer passes than planned, those that it does not need count as
finished.
"""


def measure_speed(
    runner: ForwardRunner, inputs: Inputs, plan: Plan, on_passes: OnPasses, repeats: int = REPEATS
) -> SpeedReport:
    """Return the times of forward passes over all inputs for each variant of the model: in float32, as stored, and as cast. The
    variant as stored is left out if it equals one of the others. After one warm-up pass, `repeats` passes are timed. If they take
    long, fewer are timed, but at least 3. KV caches are not rounded. A notice names each variant that does not fit into memory.

    For the float32 variant, the model is really cast to float32, as a user would run it. (Measurements of drift instead widen each
    weight when it is used.) Afterwards, the model is cast according to `plan`. `runner` must have been created with `watch=False`.
    Raises NoForward, KernelError, Cancelled.
    """
    model, planned = runner.model, plan.dtypes
    stored = {name: weight.info.dtype for name, weight in model.weights.items()}
    reference = {
        name: "float32" if model.weights[name].info.castable and dtype != "float64" else dtype
        for name, dtype in stored.items()
    }
    wanted: list[tuple[str, Mapping[str, str]]] = [("reference", reference)]
    wanted += [("as stored", stored)] if stored not in (reference, dict(planned)) else []
    wanted += [("candidate", planned)]
    rows, notices = [], []
    try:
        for number, (label, casts) in enumerate(wanted):
            if label != "candidate" and (missing := _missing_bytes(model, casts)) > 0:
                notices.append(
                    f"{label}: not timed: {missing:,} more bytes of memory are needed to hold the model in {_mix(model, casts)}"
                )
                continue
            model.apply(casts, cancelled=runner.cancelled, caches={})
            on_row_passes = part_of(on_passes, label, number * (repeats + 1), len(wanted) * (repeats + 1))
            rows.append(_timed(runner, inputs, label, _mix(model, casts), on_row_passes, repeats))
    finally:
        model.apply(planned, caches=plan.caches)
    if plan.caches:
        notices.append("the formats of KV caches are not in these times: passes are timed without rounding caches")
    return SpeedReport(
        model=model.title,
        device=str(model.device),
        threads=torch.get_num_threads(),
        rules=tuple(map(str, plan.recipe.rules)),
        inputs=inputs.description,
        rows=tuple(rows),
        notices=tuple(notices),
    )


def _timed(
    runner: ForwardRunner, inputs: Inputs, label: str, mix: str, on_passes: Callable[[int], None], repeats: int
) -> SpeedRow:
    """Time passes over all inputs with the model as currently cast. label, mix: the name and the dtypes of this variant, for the
    result. on_passes: called with the number of passes begun.
    """
    candidate = label == "candidate"  # the run settings apply to it alone
    timed, make_call = runner, runner.candidate_call
    if not candidate:
        timed = ForwardRunner(runner.model, RunSettings(), runner.cancelled, watch=False, behavior=runner.behavior)
        make_call = runner.reference_call
    calls = [make_call(batch) for batch in inputs.batches]

    def all_inputs() -> tuple[float, bool]:
        passes = [timed.candidate(call) for call in calls]
        return sum(each.seconds for each in passes), any(each.added for each in passes)

    on_passes(0)
    all_inputs()
    times: list[float] = []
    under_rules = False
    started = time.perf_counter()
    while len(times) < repeats and not (len(times) >= 3 and time.perf_counter() - started > _LONG_ENOUGH_S):
        on_passes(len(times) + 1)
        seconds, under_rules = all_inputs()
        times.append(seconds)
    tokens = sum(_tokens(batch) for batch in inputs.batches)
    middle = statistics.median(times)
    settings = str(runner.settings) if candidate and runner.settings.autocast else None
    return SpeedRow(
        what=label,
        dtypes=mix if settings is None else f"{mix}, {settings}",
        seconds=middle,
        fastest=min(times),
        slowest=max(times),
        repeats=len(times),
        tokens_per_second=tokens / middle if tokens and middle else None,
        under_rules=under_rules,
    )


def _tokens(batch: Batch) -> int:
    ids = batch.kwargs.get("input_ids")
    if ids is None and batch.args and isinstance(batch.args[0], torch.Tensor) and not batch.args[0].is_floating_point():
        ids = batch.args[0]
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0


def _missing_bytes(model: LiveModel, casts: Mapping[str, str]) -> int:
    """Return how many bytes of memory are missing for casting the model. The memory of current casts counts as free."""
    needed = sum(
        tensor_bytes(weight.info, casts[name])
        for name, weight in model.weights.items()
        if casts[name] != weight.info.dtype
    )
    held = sum(weight.nbytes for weight in model.weights.values() if weight.cast)
    free = free_bytes(model.device) or free_memory()
    return max(0, needed - held - int(0.9 * free))


def _mix(model: LiveModel, casts: Mapping[str, str]) -> str:
    """Return the short names of the dtypes in `casts`, such as "bf16 + fp8", those with the most bytes first."""
    sizes = Counter[str]()
    for name, weight in model.weights.items():
        if weight.info.castable and weight.info.persistent:
            sizes[casts[name]] += tensor_bytes(weight.info, casts[name])
    return " + ".join(dtypes.short_name(name) for name, _ in sizes.most_common())
