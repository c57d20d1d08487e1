"""The noise floor of drift: how far two runs of a model differ if they add the same numbers in a different order.

A different attention kernel or batch size changes the last bits of results. If the drift of a candidate is not above the noise
floor of the reference, which is in float32, the candidate can't be distinguished from the reference. If it is not above that of
the candidate itself, which may compute in 16 bits, another kernel changes its output as much as the recipe does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.results.attribution import NoiseFloor
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.figures import FIGURES
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.libraries.hf_private import other_attention
from dtype_engine.runtime.model.containers import with_tensors
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics, compared_rows
from dtype_engine.runtime.passes.class_dimensions import classes_dimension
from dtype_engine.runtime.passes.kept_positions import KeptPositions
from dtype_engine.runtime.passes.model_behavior import ModelBehavior, Run
from dtype_engine.runtime.passes.one_pass import PassResult
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

ENOUGH_POSITIONS = 256
"""The noise floor is measured over as many batches as it needs to compare this many output rows, such as tokens."""
_SAME_ROWS: dict[Run, float] = {"reference": 1e-2, "candidate": 0.3}
_MORE_THAN_ROUNDING: dict[Run, float] = {"reference": 1e-3, "candidate": 0.3}
"""A relative difference that most rows do not reach if numbers are only added in another order: 60 dB in float32, and 10 dB in a
candidate, which may compute in 16 bits.
"""
_PLAIN = RunSettings()
_RUNS = 4
"""How many runs the progress counts for each batch: the reference, another attention, and two for a batch of two."""


def measure_noise_floor(
    model: LiveModel,
    inputs: Inputs,
    behavior: ModelBehavior,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: IsCancelled = never,
    settings: RunSettings = _PLAIN,
    run: Run = "reference",
) -> NoiseFloor:
    """Return the noise floor: the largest differences between a run and two variants of it, one with a different attention
    implementation and one with each input twice in a batch. Variants that the model does not support are skipped.

    behavior: what earlier passes have shown about the model. settings: those of candidate runs. run: the run of which the floor is
    measured. `on_progress(done, total)` is called with the numbers of finished runs and of all runs, each on one input; `total` is
    an estimate. Raises NoForward if the run fails.
    """
    comparisons: dict[str, OutputMetrics] = {}
    margins: list[float] = []
    positions = 0
    watch = bool(model.cache_formats)  # KV caches are rounded in observed passes only
    with ForwardRunner(model, settings, cancelled, watch=watch, behavior=behavior) as runner:
        if run == "candidate":
            runner.calibrate_caches(inputs.batches)
        for number, batch in enumerate(inputs.batches):
            expected = _expected(number, positions, len(inputs.batches))
            on_progress(_RUNS * number, _RUNS * expected)
            ran = _run(runner, run, batch)
            name, reference = main_output(ran.output)
            reference = reference.detach().clone()
            dimension = classes_dimension(model.module, name, reference, settings.classes_dim)
            masks = KeptPositions.of(model.module, batch, model.device, ran.attended)
            kept = None if masks is None else masks.of_main(name, reference)
            on_progress(_RUNS * number + 1, _RUNS * expected)
            runner.behavior = copy.deepcopy(behavior)  # a variant that fails must not change the known facts
            for done, (variant, again) in enumerate(_variants(runner, run, batch, reference), start=1):
                on_progress(_RUNS * number + done + 1, _RUNS * expected)
                if again is not None:
                    comparison = comparisons.setdefault(variant, OutputMetrics(dimension))
                    comparison.add(reference, again, kept=kept)
                    if dimension is not None:
                        rows = (compared_rows(each, dimension, kept) for each in (reference, again))
                        margins.append(_change_of_lead(*rows))
            runner.behavior = behavior
            positions += len(compared_rows(reference, dimension, kept))
            if positions >= ENOUGH_POSITIONS:
                break
    drifts = {variant: comparison.result() for variant, comparison in comparisons.items()}
    return _worst(drifts, positions, max(margins, default=None))


def _change_of_lead(reference: torch.Tensor, again: torch.Tensor) -> float:
    """Return the largest change, at a position, of the lead that the most likely class has over the second, in nats. Positions with
    infinite logits or NaN do not count. reference, again: logits [positions, classes].
    """
    top = reference.topk(2, -1).indices
    leads = [torch.diff(each.gather(-1, top).cpu().double(), dim=-1) for each in (reference, again)]
    change = (leads[1] - leads[0]).abs()
    return float(change[change.isfinite()].max()) if change.isfinite().any() else 0.0


def _expected(done: int, positions: int, batches: int) -> int:
    return batches if not positions else min(batches, max(done + 1, math.ceil(ENOUGH_POSITIONS * done / positions)))


def _worst(drifts: dict[str, OutputDrift], positions: int, margin: float | None) -> NoiseFloor:
    worst = {"sqnr_db": 0.0, "max_abs": 0.0, "rel_l2": 0.0}
    for name in (*worst, "kl_mean", "top1_agreement"):
        figure = FIGURES[name]
        values = [value for drift in drifts.values() if (value := figure.of(drift)) is not None]
        if values:
            worst[name] = max(values) if figure.better == "less" else min(values)
    return NoiseFloor(tuple(drifts), positions, **worst, margin=margin)


def _run(runner: ForwardRunner, run: Run, batch: Batch) -> PassResult[Any]:
    if run == "reference":
        return runner.reference(runner.reference_call(batch))
    return runner.candidate(runner.candidate_call(batch))


def _variants(
    runner: ForwardRunner, run: Run, batch: Batch, output: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Run variants of a run. Yields (name, main output or None if it fails). output: the main output of the run itself."""
    with other_attention(runner.model.module) as attention:
        yield f"{attention} attention", _attempt(runner, run, batch, output) if attention else None
    yield "batch of two", _attempt(runner, run, Batch(_twice(batch.args), _twice(batch.kwargs)), output, 2)


def _attempt(
    runner: ForwardRunner, run: Run, batch: Batch, reference: torch.Tensor, times: int = 1
) -> torch.Tensor | None:
    """Run a variant on `batch`, in which each input occurs `times` times. Returns the main output for the first copy, or None if
    the run fails, if the copies have different outputs, or if most rows differ from `reference` by more than rounding. reference:
    the main output for the inputs without repetition.
    """
    try:
        output = main_output(_run(runner, run, batch).output)[1]
    except (UserError, RuntimeError, ValueError, TypeError, IndexError):
        return None
    if reference.ndim == 0 or output.shape != (times * reference.shape[0], *reference.shape[1:]):
        return None
    parts, same = output.chunk(times), _SAME_ROWS[run]
    # If the first dimension is time instead of the batch, the second part differs from the first.
    if any(not torch.allclose(part, parts[0], same, same, equal_nan=True) for part in parts[1:]):
        return None
    is_other = times > 1 and _is_other_arithmetic(reference, parts[0], _MORE_THAN_ROUNDING[run])
    return None if is_other else parts[0]


def _is_other_arithmetic(reference: torch.Tensor, again: torch.Tensor, most: float) -> bool:
    """Return whether most rows of `again` differ from those of `reference` by more than rounding, which is the share `most` of a
    row. A batch of two then does not repeat the reference, because the examples of a batch affect each other, for example through a
    norm of the whole batch. A few differing rows do not count: a router may send a token elsewhere because of the last bit.
    """
    size, difference = (torch.linalg.vector_norm(each, dim=-1) for each in (reference, again - reference))
    return float((difference > most * size).float().mean()) > 0.5


def _twice(value: Any) -> Any:
    return with_tensors(value, lambda tensor: torch.cat([tensor, tensor]) if tensor.ndim else tensor)
